"""Rivals of our sync: a file over HTTP, and plain TCP.

nginx and curl     the whole bf16 file, sendfile, no TLS: what a run without deltas does
iperf3             bytes from memory over a number of connections: the ceiling of the line
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.sync_lab.network import Namespace

HTTP_PORT: Final = 8080
TCP_PORT: Final = 8082
STARTS_WITHIN_S: Final = 10.0

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
    with _process(command):
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
    with _process(namespace.command("iperf3", "--server", "--port", str(TCP_PORT))):
        yield


def tcp_progress(
    namespace: Namespace, address: str, *, connections: int, size_bytes: int
) -> list[tuple[float, int]]:
    """Fetch so much over plain TCP; return (seconds, payload bytes of all connections so far)."""
    server = ("--client", address, "--port", str(TCP_PORT), "--reverse")
    much = ("--parallel", str(connections), "--bytes", str(size_bytes))
    command = namespace.command("iperf3", *server, *much, "--interval", "0.1", "--json")
    deadline_s = time.monotonic() + STARTS_WITHIN_S
    while (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"iperf3 does not answer: {done.stdout}")
        time.sleep(0.1)
    progress = [(0.0, 0)]
    for interval in json.loads(done.stdout)["intervals"]:
        progress.append((interval["sum"]["end"], progress[-1][1] + interval["sum"]["bytes"]))
    return progress


@contextmanager
def _process(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()
