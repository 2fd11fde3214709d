"""Plain TCP from memory to nowhere: ``send PORT``, or ``receive HOST:PORT CONNECTIONS BYTES``.

The receiver prints the goodput of all connections together, bytes per second, between 40 % and 90 %
of the bytes: after slow start, and before the first connection ends.
"""

import socket
import sys
import threading
import time
from typing import Final

BLOCK: Final = bytes(1 << 20)
STEADY: Final = (0.4, 0.9)


def send(port: int) -> None:
    """Send as many bytes as each caller names in its first line, for ever."""
    with socket.create_server(("0.0.0.0", port), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_send, args=(connection,), daemon=True).start()


def receive(address: tuple[str, int], connections: int, size_bytes: int) -> float:
    """Return the steady goodput, bytes per second."""
    progress = [(time.monotonic(), 0)]
    lock = threading.Lock()

    def read() -> None:
        block = bytearray(1 << 20)
        with _connected(address) as connection:
            connection.sendall(b"%d\n" % (size_bytes // connections))
            while count := connection.recv_into(block):
                with lock:
                    progress.append((time.monotonic(), progress[-1][1] + count))

    threads = [threading.Thread(target=read) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return steady_goodput(progress)


def steady_goodput(progress: list[tuple[float, int]]) -> float:
    """Return the bytes per second between the STEADY shares of (seconds, bytes so far), growing."""
    total = progress[-1][1]
    start, end = (next(point for point in progress if point[1] >= share * total) for share in STEADY)
    return (end[1] - start[1]) / (end[0] - start[0])


def _connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise


def _send(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as lines:
        left = int(lines.readline())
        while left:
            connection.sendall(memoryview(BLOCK)[: min(left, len(BLOCK))])
            left -= min(left, len(BLOCK))


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(int(sys.argv[2]))
    else:
        host, _, port = sys.argv[2].rpartition(":")
        print(receive((host, int(port)), int(sys.argv[3]), int(sys.argv[4])))
