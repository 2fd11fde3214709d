"""Programs without network, files, or sight of other processes: bubblewrap, with namespaces of its own.

    /usr, this Python      read-only; nothing else of this machine is there, neither /proc nor /etc
    /program.py, ...       what the caller gives, read-only
    standard streams       the caller's
    environment            empty
    system calls           see ``call_filter``; limits: see ``inside.shared``

Nothing can be written but the streams. The sandbox ends, with all in it, when the caller ends or kills it.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import StartupError
from sampler.tasks.code import inside
from sampler.tasks.code.call_filter import call_filter
from sampler.tasks.code.inside.shared import BEGUN

TRIAL_S: Final = 30.0
"""Longest wait for the trial at the start."""

_ROOM: Final = "/inside/sampler/tasks/code/inside"

_FIX: Final = (
    "Install bubblewrap and libseccomp2, and let this process make user namespaces: sysctl "
    "user.max_user_namespaces=10000 and, where there is one, kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container, its seccomp profile must allow them; under systemd, RestrictNamespaces forbids them. "
    "Or leave this run to samplers that have a sandbox."
)


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
        command = [self.bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
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
        return [*command, python, "-S", "-s", "-B", "-P", "-m", f"{inside.__name__}.{host}", *arguments]

    def check(self) -> None:
        """Run a program in it, for a moment; StartupError if the sandbox does not start."""
        with _descriptors({"filter": self.filter, "program.py": b"print(6 * 7)"}) as numbers:
            try:
                trial = subprocess.run(
                    self._command(numbers, "program_host", "run", "10", str(1 << 29)),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    pass_fds=tuple(numbers.values()),
                    env={},
                    timeout=TRIAL_S,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise StartupError(f"The sandbox for programs does not start: {error}", fix=_FIX) from error
        if (trial.stdout, trial.stderr) != (b"42\n", BEGUN):
            said = trial.stderr.decode(errors="replace").strip()[-300:]
            raise StartupError(f"The sandbox for programs does not start: {said or 'no answer'}", fix=_FIX)


def find_sandbox() -> Sandbox:
    """Return the sandbox of this machine, untried; StartupError if a part of it is not installed."""
    if (bwrap := shutil.which("bwrap")) is None:
        raise StartupError("Programs need a sandbox, and the program bwrap is not installed", fix=_FIX)
    try:
        return Sandbox(bwrap, call_filter())
    except OSError as error:
        raise StartupError(f"The filter of the sandbox cannot be made: {error}", fix=_FIX) from error


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
