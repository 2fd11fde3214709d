"""The process of a grader whose task runs elsewhere: passes lines to a socket and back.

    python -m sampler.tasks.processes.grader_link SOCKET CPU_SECONDS MEMORY_BYTES

At the socket systemd starts ``grader_worker`` for each connection, in a unit that may make the namespaces of
a sandbox and has no network and no keys. That process ends with the connection, and so with this one.
"""

import os
import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.errors import StartupError
from sampler.process_tree import adopt_orphans

CHUNK_BYTES: Final = 1 << 16


def check_socket(path: Path) -> None:
    """Connect, and no more; StartupError if nobody listens."""
    try:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(str(path))
    except OSError as error:
        raise StartupError(
            f"programs_socket = {path} cannot be connected: {error}",
            fix="Start its unit: systemctl enable --now heterorl-programs.socket. Or unset it where this "
            "daemon may make user namespaces.",
        ) from error


def main(path: str, limits: str) -> None:
    """Connect, say the limits, and pass on what comes until either side ends."""
    adopt_orphans()  # to end with the sampler
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(path)
        there.sendall(f"{limits}\n".encode())
        ways: dict[int, Callable[[bytes], None]] = {0: there.sendall, there.fileno(): _print}
        while ways:
            for number in select.select(list(ways), [], [])[0]:
                if chunk := os.read(number, CHUNK_BYTES):
                    ways[number](chunk)
                elif number == 0:
                    there.shutdown(socket.SHUT_WR)
                    del ways[0]
                else:
                    return


def _print(chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(1, chunk) :]


if __name__ == "__main__":
    main(sys.argv[1], " ".join(sys.argv[2:]))
