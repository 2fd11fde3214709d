"""An S3 server in a process of its own (moto's), which can be killed and started again, and buckets in it."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import obstore
import pytest

from deploy.runs.run_directory import free_ports
from node.weights.transfer.bucket import Bucket

NAME = "weights"
RUN, HUB = "example", "hub-1"


@dataclass
class ObjectStore:
    """The server. What is in it dies with its process."""

    log: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Empty the server but for a bucket, and start it if it does not run; return when it answers."""
        if self._process is None:
            self._process = self._started()
        self.go_on()  # a test that failed may have halted it
        async with asyncio.timeout(90), httpx.AsyncClient() as client:
            while True:
                try:
                    await client.post(f"{self.url}/moto-api/reset")
                    (await client.put(f"{self.url}/{NAME}")).raise_for_status()
                    return
                except httpx.TransportError:
                    assert self._process.poll() is None, self.log.read_text()[-1000:]
                    await asyncio.sleep(0.1)

    def _started(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self.log.open("ab") as log:
            return subprocess.Popen(argv, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill the server, at whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def halt(self) -> None:
        """Stop the server: it takes requests and answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def credentials(self) -> Iterator[None]:
        """Set what a hub finds in its environment."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", self.url)
            patch.setenv("AWS_ACCESS_KEY_ID", "a-hub")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "its-secret")
            patch.setenv("AWS_REGION", "us-east-1")
            yield

    def bucket(self) -> Bucket:
        """Return a hub's bucket, as its configuration names it."""
        with self.credentials():
            return Bucket.open(f"s3://{NAME}/runs", run_id=RUN, node_id=HUB)


async def read(bucket: Bucket, name: str) -> bytes:
    """Return an object."""
    return bytes(await (await obstore.get_async(bucket._store, name)).bytes_async())


async def write(bucket: Bucket, name: str, content: bytes) -> None:
    """Put something else in the place of an object, as whoever has the bucket's keys can."""
    await obstore.put_async(bucket._store, name, content)


async def blocks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
