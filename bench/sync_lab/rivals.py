"""Rivals of our sync: a file over HTTP, and plain TCP.

nginx and curl     the whole bf16 file, sendfile, no TLS: what a run without deltas does
tcp_stream         bytes from memory over a number of connections: the ceiling of the line
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.sync_lab.network import Namespace

HTTP_PORT: Final = 8080
TCP_PORT: Final = 8082

_NGINX: Final = """
user root; daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log {directory}/error.log;
events {{}}
http {{
  access_log off; sendfile on; tcp_nopush on; client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  server {{ listen {port}; root {root}; }}
}}
"""


@contextmanager
def nginx(namespace: Namespace, root: Path, directory: Path) -> Iterator[None]:
    """Serve the files of ``root`` on HTTP_PORT."""
    directory.mkdir(parents=True)
    file = directory / "nginx.conf"
    file.write_text(_NGINX.format(directory=directory, root=root, port=HTTP_PORT))
    command = namespace.command("nginx", "-c", str(file), "-p", str(directory))
    with _process(command, log=directory / "log"):
        yield


def curl(namespace: Namespace, address: str, name: str, target: Path) -> float:
    """Fetch a file; give the seconds from the call to its last byte on disk."""
    started = time.monotonic()
    url = f"http://{address}:{HTTP_PORT}/{name}"
    namespace.run("curl", "-sSf", "--retry-connrefused", "--retry", "5", "-o", str(target), url)
    return time.monotonic() - started


@contextmanager
def tcp_sender(namespace: Namespace) -> Iterator[None]:
    """Serve bytes on TCP_PORT."""
    module = "bench.sync_lab.tcp_stream"
    with _process(namespace.command(sys.executable, "-m", module, "send", str(TCP_PORT)), log=None):
        yield


def tcp_goodput(namespace: Namespace, address: str, *, connections: int, size_bytes: int) -> float:
    """Return payload bytes per second of plain TCP in the middle of a transfer: from 40 % to 90 % of it."""
    arguments = ("receive", f"{address}:{TCP_PORT}", str(connections), str(size_bytes))
    command = namespace.command(sys.executable, "-m", "bench.sync_lab.tcp_stream", *arguments)
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@contextmanager
def _process(command: list[str], *, log: Path | None) -> Iterator[None]:
    with open(log or os.devnull, "ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait()
