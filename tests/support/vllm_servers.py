"""vLLM servers for tests of the remote engine: one for each model, kept until the tests end."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import blake3

from node.errors import StartupError
from node.system.file_lock import FileLock
from sampler.engines.words.frame_memory import DIRECTORY_VARIABLE

START_LIMIT_S: Final = 280.0
END_LIMIT_S: Final = 20.0

_SERVERS: Final[dict[bytes, list["StartedServer"]]] = {}
"""By the digest of the model and the number of workers."""


@dataclass(eq=False)
class StartedServer:
    """A server of a model, which may not listen yet."""

    model_dir: Path
    workers: int
    port: int
    weights_dir: Path
    process: "subprocess.Popen[bytes]" = field(init=False)

    def start(self) -> None:
        arguments = {
            "model": self.model_dir,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "kv-cache-memory-bytes": "64M",
            "tensor-parallel-size": self.workers,
            "worker-extension-cls": "support.slow_server_worker.SlowServerWorker",
        }
        with (self.weights_dir / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm.entrypoints.openai.api_server",  # vLLM's command does not know the CPU build's name
                    *(part for name, value in arguments.items() for part in (f"--{name}", str(value))),
                    "--enforce-eager",
                    "--enable-scale-out",
                    "--no-async-scheduling",
                ],
                env=os.environ
                | {
                    "VLLM_SERVER_DEV_MODE": "1",
                    "VLLM_USE_V2_MODEL_RUNNER": "0",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "VLLM_NO_USAGE_STATS": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    DIRECTORY_VARIABLE: str(self.weights_dir),
                    # vLLM leaves sockets and files there, also when it is ended in order.
                    "TMPDIR": str(self.weights_dir),
                    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_tests",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        """Signal the server and its workers."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End it, or kill it, and remove what it leaves in the shared memory."""
        self.process.terminate()
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for meeting in self.weights_dir.glob("vllm_dist_*"):
            for memory in Path("/dev/shm").glob(f"{meeting.name}-*"):
                memory.unlink()

    def kill(self) -> None:
        """Kill it with its workers."""
        self.send(signal.SIGKILL)
        self.process.wait()

    @property
    def options(self) -> dict[str, Any]:
        """The engine's."""
        return {
            "address": f"http://127.0.0.1:{self.port}",
            "weights_dir": self.weights_dir,
            "start_limit_s": START_LIMIT_S,
        }

    def is_free(self) -> bool:
        """Return whether no engine uses it."""
        try:
            FileLock.take(self.weights_dir / "lock", of="the server", fix="").release()
        except StartupError:
            return False
        return True


def server_of(model_dir: Path, *, workers: int = 1) -> StartedServer:
    """Return a server of this model that no engine uses."""
    known = _SERVERS.setdefault(_digest(model_dir, workers), [])
    for server in known:
        if server.is_free():
            return server
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    weights_dir = Path(tempfile.mkdtemp(prefix="heterorl-test-", dir="/dev/shm"))
    known.append(StartedServer(model_dir, workers, port, weights_dir))
    known[-1].start()
    atexit.register(shutil.rmtree, weights_dir)
    atexit.register(known[-1].end)
    return known[-1]


def options_of(model_dir: Path, *, workers: int) -> dict[str, Any]:
    """Return the options of an engine at such a server; a directory without a model has none."""
    if (model_dir / "config.json").exists():
        return server_of(model_dir, workers=workers).options
    return {"address": "http://127.0.0.1:9", "weights_dir": model_dir / "weights"}


def _digest(model_dir: Path, workers: int) -> bytes:
    files = blake3.blake3(bytes([workers]))
    for path in sorted(model_dir.iterdir()):
        if path.is_file():
            files.update(path.name.encode() + path.read_bytes())
    return files.digest()
