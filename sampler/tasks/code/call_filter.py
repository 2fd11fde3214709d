"""The system calls that a program in the sandbox may not make, as a filter that the kernel runs.

Namespaces already keep it from files, network and processes; this bounds its memory, by allowing one process
only and no memory outside its address space, and keeps it from parts of the kernel that programs do not need.
"""

import ctypes
import errno
import os
from typing import Final

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
