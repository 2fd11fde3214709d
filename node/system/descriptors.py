"""The open files of this process: how many it may have and has, and for how many peers that is enough.

A connection is an open file. A hub that has run out of them serves those it has and takes in no other, and
whatever else it opens (an artifact, a scrape) fails as well.
"""

import contextlib
import os
import resource
import sys
from typing import Final

CONNECTIONS_PER_PEER: Final = 4
"""For heartbeats, for rollouts and, with the answers that announce versions, two for weights."""

OWN_FILES: Final = 64
"""Ledger, locks, logs, sockets that listen, libraries: 40 to 50 of an idle coordinator."""

_MOST: Final = 1 << 20
"""Containers often allow a thousand times as many; programs that a task starts may close each one in turn."""


def fill_standard_descriptors() -> None:
    """Open the null device where standard input, output or error is closed.

    Otherwise the next file that is opened, a ledger or a connection, gets their number, and what a library
    prints is written there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one. Children need it as much.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def raise_limit() -> int:
    """Allow this process as many open files as an unprivileged one may have; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def hard_limit() -> int:
    """Return how many it could allow itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)


def open_now() -> int:
    """Return how many files are open; the limit where not even counting them is possible any more.

    Linux counts them itself since 6.2, in 3 us. Listing takes 1 to 3 ms for 1000 of them.
    """
    with contextlib.suppress(OSError):  # macOS has no such directory
        if counted := os.stat("/proc/self/fd").st_size:
            return counted
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return limit()


def reserve(most: int) -> int:
    """Return how many of ``most`` descriptors connections must leave for everything else."""
    return max(32, min(most // 8, 512))


def peers_with_room(most: int) -> int:
    """Return how many peers can be connected to a hub that may have ``most`` files open."""
    return max(0, most - OWN_FILES - reserve(most)) // CONNECTIONS_PER_PEER
