"""What happens first in a sandbox: limits that the kernel enforces, and a sign that they hold."""

import os
import resource
from typing import Final

BEGUN: Final = b"begun\n"
"""Written to standard error once the limits hold. Anything else there was written by bwrap or Python."""

THREADS: Final = 64
"""Processes are not allowed at all. Not enforced for root."""

OPEN_FILES: Final = 64


def begin(cpu_s: int, memory_bytes: int) -> None:
    """Limit this process for good. Nothing here can be written to, but what is open already."""
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # SIGXCPU, and then SIGKILL for those who ignore it
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_NPROC, THREADS, THREADS),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    os.write(2, BEGUN)
