"""Programs without network, files, or sight of other processes: bubblewrap, with namespaces of its own.

    /usr, this Python      read-only; nothing else of this machine is there, neither /proc nor /etc
    /program.py, ...       what the caller gives, read-only
    standard streams       the caller's
    environment            empty
    system calls           not those of ``REFUSED``; limits: see ``inside.shared``

Nothing can be written but the streams. The sandbox ends, with all in it, when the caller ends or kills it.

Namespaces keep a program from files, network and processes. The filter of system calls bounds its memory, by
allowing one process only and no memory outside its address space, and keeps it from parts of the kernel that
programs do not need.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import StartupError
from sampler.graders.code import inside
from sampler.graders.code.inside.shared import BEGUN

TRIAL_S: Final = 30.0
"""Longest wait for the trial at the start."""

_ROOM: Final = "/inside/" + inside.__name__.replace(".", "/")

_INSTALL: Final = "Install bubblewrap and libseccomp2."

_FORBIDDERS: Final = (
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000."),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1."),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "Give bwrap an AppArmor profile that allows userns, or sysctl "
        "kernel.apparmor_restrict_unprivileged_userns=0.",
    ),
)
"""Settings of the kernel that forbid user namespaces, and what to do about them."""

_FILTERED: Final = (
    "A filter of system calls holds for this process: in a container, start it with the seccomp profile "
    "deploy/seccomp.json and no AppArmor profile; under systemd, enable heterorl-programs.socket and set "
    "programs_socket."
)

_ALLOW: Final = 0x7FFF0000
_FAIL_WITH: Final = 0x00050000
_CLONE_THREAD: Final = 0x00010000
_MASKED_EQUAL: Final = 7

# fmt: off
REFUSED: Final = (
    "fork", "vfork", "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount",
    "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "ptrace", "process_vm_readv",
    "process_vm_writev", "process_madvise", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "kcmp", "bpf",
    "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "keyctl",
    "add_key", "request_key", "socket", "memfd_create", "memfd_secret", "shmget", "shmat", "msgget",
    "semget", "mq_open", "personality", "name_to_handle_at", "open_by_handle_at", "fanotify_init",
    "inotify_init", "inotify_init1", "acct", "quotactl", "swapon", "init_module", "finit_module",
    "kexec_load", "reboot",
)
# fmt: on
"""Refused with EPERM. Those that this kernel or processor does not have are passed over."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Starts programs in sandboxes."""

    bwrap: str
    filter: bytes

    async def start(
        self, host: str, *arguments: str, files: Mapping[str, bytes], stdin: int, stdout: int
    ) -> asyncio.subprocess.Process:
        """Start a module of ``inside`` in a process group of its own; its standard error is a pipe.

        Args:
            host: The module's name.
            arguments: On its command line.
            files: Name at the root -> content.
            stdin, stdout: Descriptors, or as for ``asyncio.create_subprocess_exec``.
        """
        with _descriptors({"filter": self.filter, **files}) as numbers:
            return await asyncio.create_subprocess_exec(
                *self._command(numbers, host, *arguments),
                stdin=stdin,
                stdout=stdout,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=tuple(numbers.values()),
                env={},
                # To be killed as a group: bwrap's child does not follow it before its namespaces are made.
                start_new_session=True,
            )

    def _command(self, numbers: Mapping[str, int], host: str, *arguments: str) -> list[str]:
        filter_number = str(numbers["filter"])
        command = [
            self.bwrap,
            "--unshare-user",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
        ]
        command += ["--uid", "65534", "--gid", "65534"]
        command += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        command += ["--ro-bind", "/usr", "/usr"]
        for name in ("/bin", "/lib", "/lib32", "/lib64"):
            if (path := Path(name)).is_symlink():
                command += ["--symlink", os.readlink(path), name]
            elif path.is_dir():
                command += ["--ro-bind", name, name]
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        command += ["--ro-bind", str(Path(str(inside.__file__)).parent), _ROOM]
        for name, number in numbers.items():
            command += [] if name == "filter" else ["--ro-bind-data", str(number), f"/{name}"]
        for device in ("/dev/null", "/dev/urandom"):
            command += ["--dev-bind", device, device]
        command += ["--remount-ro", "/", "--chdir", "/", "--clearenv"]
        # A set of texts is printed in the same order everywhere.
        command += ["--setenv", "PYTHONPATH", "/inside", "--setenv", "PYTHONHASHSEED", "0"]
        # A thread takes no more address space than its stack.
        command += ["--setenv", "PYTHONUTF8", "1", "--setenv", "MALLOC_ARENA_MAX", "1"]
        command += ["--seccomp", filter_number]
        python = os.path.realpath(sys.executable)
        begin = f"from {inside.__name__}.{host} import main; main()"  # runpy costs more than Python itself
        return [*command, python, "-S", "-s", "-B", "-P", "-c", begin, *arguments]

    def check(self) -> None:
        """Run a program in it, for a moment; StartupError if the sandbox does not start."""
        with _descriptors({"filter": self.filter, "program.py": b"print(6 * 7)"}) as numbers:
            try:
                trial = subprocess.run(
                    self._command(numbers, "script_host", "10", str(1 << 29)),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    pass_fds=tuple(numbers.values()),
                    env={},
                    timeout=TRIAL_S,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise StartupError(
                    f"The sandbox for programs does not start: {error}", fix=_remedy()
                ) from error
        if (trial.stdout, trial.stderr) != (b"42\n", BEGUN):
            said = trial.stderr.decode(errors="replace").strip()[-300:]
            raise StartupError(
                f"The sandbox for programs does not start: {said.rstrip('.') or 'no answer'}", fix=_remedy()
            )


def find_sandbox() -> Sandbox:
    """Return the sandbox of this machine, untried; StartupError if a part of it is not installed."""
    if (bwrap := shutil.which("bwrap")) is None:
        raise StartupError("Programs need a sandbox, and the program bwrap is not installed", fix=_INSTALL)
    try:
        return Sandbox(bwrap, call_filter())
    except OSError as error:
        raise StartupError(f"The filter of the sandbox cannot be made: {error}", fix=_INSTALL) from error


def _remedy() -> str:
    """Return what to do about all that may forbid user namespaces here."""
    found = [remedy for file, value, remedy in _FORBIDDERS if _content(file).strip() == value]
    if "\nSeccomp:\t2\n" in _content("/proc/self/status"):
        found.append(_FILTERED)
    return " ".join(found or ["bubblewrap must be able to make user namespaces here."]) + (
        " Or set run_code = false and leave this run to peers that have a sandbox."
    )


def _content(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def _descriptors(contents: Mapping[str, bytes]) -> Iterator[dict[str, int]]:
    """Open each content as a file that only its descriptor names."""
    with contextlib.ExitStack() as stack:
        numbers = {}
        for name, content in contents.items():
            numbers[name] = memory_file(content)
            stack.callback(os.close, numbers[name])
        yield numbers


def memory_file(content: bytes) -> int:
    """Return a descriptor of a file that holds ``content``, at its beginning; the caller closes it."""
    number = os.memfd_create("content")
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def call_filter() -> bytes:
    """Return the filter for bwrap's ``--seccomp``, by libseccomp; OSError if that is missing, or fails."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(_Comparison),
    ]
    rules = library.seccomp_init(_ALLOW)
    if not rules:
        raise OSError("seccomp_init failed")

    def refuse(name: str, error: int, *comparisons: _Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return
        array = (_Comparison * len(comparisons))(*comparisons)
        if code := library.seccomp_rule_add_array(rules, _FAIL_WITH | error, number, len(comparisons), array):
            raise OSError(-code, f"seccomp_rule_add {name}")

    try:
        for name in REFUSED:
            refuse(name, errno.EPERM)
        # Threads are allowed, processes not. What clone3 asks for lies in memory: libc then tries clone.
        refuse("clone", errno.EPERM, _Comparison(0, _MASKED_EQUAL, _CLONE_THREAD, 0))
        refuse("clone3", errno.ENOSYS)
        file = os.memfd_create("filter")
        try:
            if code := library.seccomp_export_bpf(rules, file):
                raise OSError(-code, "seccomp_export_bpf")
            return os.pread(file, 1 << 20, 0)
        finally:
            os.close(file)
    finally:
        library.seccomp_release(rules)
