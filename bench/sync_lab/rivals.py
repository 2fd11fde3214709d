"""Rivals of our sync: a file over HTTP, shardcast, and plain TCP.

nginx and curl     the whole bf16 file, sendfile, no TLS: what a run without deltas does
shardcast          the same file through its own server and client, in a venv of its own
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
SHARDCAST_PORT: Final = 8081
TCP_PORT: Final = 8082
SHARDCAST: Final = "shardcast==0.3.2"

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


# Its clients ask each server for data1.bin, to see how fast it is.
_SHARDCAST_ORIGIN: Final = f"""
import pathlib, sys, time, shardcast
directory = pathlib.Path(sys.argv[1])
directory.mkdir()
(directory / "data1.bin").write_bytes(bytes(1 << 20))
shardcast.initialize(str(directory), {SHARDCAST_PORT})
shardcast.broadcast(sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""
_SHARDCAST_CLIENT: Final = """
import sys, time
from shardcast import ClientNode
client = ClientNode([sys.argv[1]], sys.argv[2])
started = time.monotonic()
version = next(iter(client.list_available_versions()))
assert client.download_version(version) is not None
print(time.monotonic() - started)
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


def install_shardcast(directory: Path) -> Path | str:
    """Return the interpreter of a new venv that has it, or say why there is none."""
    python = directory / "bin" / "python"
    steps = (
        [sys.executable, "-m", "venv", str(directory)],
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", SHARDCAST],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(step[1:4])}: {done.stderr.strip().splitlines()[-1]}"
    return python


@contextmanager
def shardcast(namespace: Namespace, python: Path, file: Path, directory: Path) -> Iterator[None]:
    """Serve a file as its origin server does, in shards of 50 MB; ready when it says so."""
    command = namespace.command(str(python), "-c", _SHARDCAST_ORIGIN, str(directory), str(file))
    with open(os.devnull, "ab") as nowhere:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=nowhere, text=True)
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            if process.poll() is not None:
                raise OSError("the shardcast origin server did not start")
        yield
    finally:
        process.kill()
        process.wait()


def shardcast_fetch(namespace: Namespace, python: Path, address: str, directory: Path) -> float:
    """Fetch and check the file as its client does; give the seconds that took, without the client's start."""
    url = f"http://{address}:{SHARDCAST_PORT}"
    command = namespace.command(str(python), "-c", _SHARDCAST_CLIENT, url, str(directory))
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


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
