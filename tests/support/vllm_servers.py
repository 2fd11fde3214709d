"""vLLM servers for tests of the remote engine: one for each model, kept until the tests end."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import blake3

from node.errors import StartupError
from node.file_lock import FileLock
from sampler.engines.remote.frame_memory import DIRECTORY_VARIABLE

START_LIMIT_S: Final = 280.0

_SERVERS: Final[dict[bytes, list[dict[str, Any]]]] = {}
"""Digest of the model and number of workers -> the options of the engine."""


def options_of(model_dir: Path, *, workers: int) -> dict[str, Any]:
    """Return where a server of this model is that no engine uses; it may be starting.

    A directory without a model has none.
    """
    if not (model_dir / "config.json").exists():
        return {"address": "http://127.0.0.1:9", "weights_dir": model_dir / "weights"}
    known = _SERVERS.setdefault(_digest(model_dir, workers), [])
    for options in known:
        if _is_free(options["weights_dir"]):
            return options
    known.append(_started(model_dir, workers))
    return known[-1]


def _digest(model_dir: Path, workers: int) -> bytes:
    files = blake3.blake3(bytes([workers]))
    for path in sorted(model_dir.iterdir()):
        if path.is_file():
            files.update(path.name.encode() + path.read_bytes())
    return files.digest()


def _is_free(directory: Path) -> bool:
    try:
        FileLock.take(directory / "lock", of="the server", fix="").release()
    except StartupError:
        return False
    return True


def _started(model_dir: Path, workers: int) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    weights_dir = Path(tempfile.mkdtemp(prefix="heterorl-test-", dir="/dev/shm"))
    arguments = {
        "model": model_dir,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "kv-cache-memory-bytes": "64M",
        "tensor-parallel-size": workers,
        "worker-extension-cls": "support.slow_server_worker.SlowServerWorker",
    }
    log = (weights_dir / "log").open("wb")
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",  # vllm's command does not know the CPU build's name
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
            DIRECTORY_VARIABLE: str(weights_dir),
        },
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    atexit.register(_end, server, weights_dir)
    return {
        "address": f"http://127.0.0.1:{port}",
        "weights_dir": weights_dir,
        "start_limit_s": START_LIMIT_S,
    }


def _end(server: "subprocess.Popen[bytes]", weights_dir: Path) -> None:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    shutil.rmtree(weights_dir)
