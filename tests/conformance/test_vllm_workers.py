"""Accidents of vLLM's workers on several devices: one is killed or hangs, their sampler is killed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from node.values.groups.sampling_parameters import SamplingParameters
from sampler.config import SamplerConfig
from sampler.engines.restartable_engine import FAULTS, EngineEndedError, RestartableEngine
from sampler.sampler_role import load_configured_engine
from support.engines import Driven, load, settings_of
from support.tiny_model import make_tiny_model

LONG = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=100)
SHORT = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)
LIMIT_S = 60

LOADED = """
import sys
from pathlib import Path
from support.engines import load

if __name__ == "__main__":
    engine = load("vllm-two", Path(sys.argv[1]))
    print("loaded", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), head_size=32)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files, of this process and of those it starts."""
    # Not there: it is compiled once for all tests.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_tests")
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


@pytest.fixture
def others() -> list[psutil.Process]:
    """Processes of the servers that other tests started, which are kept until the tests end."""
    return workers_of(os.getpid())


def workers_of(process: int, *, but: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    started = psutil.Process(process).children(recursive=True)
    return [worker for worker in started if worker.name().startswith("VLLM") and worker not in but]


def names_in(temporary: Path) -> list[str]:
    # Whatever TORCHINDUCTOR_CACHE_DIR says, torch makes an empty directory here.
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def names_of_shared_memory(process: psutil.Process) -> set[str]:
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return {name for name in mapped if "/sem." not in name and not name.endswith("(deleted)")}


def test_nothing_of_a_loaded_engine_has_a_name_that_could_be_left(
    model_dir: Path, temporary: Path, others: list[psutil.Process]
) -> None:
    engine = load("vllm-two", model_dir)
    processes = [psutil.Process(), *workers_of(os.getpid(), but=others)]
    assert len(processes) == 3
    assert set().union(*map(names_of_shared_memory, processes)) == set()
    assert names_in(temporary) == []
    assert "VLLM_RPC_BASE_PATH" not in os.environ  # a server that is started now makes sockets too
    driven = Driven.of(engine, "in_place", model_dir)
    driven.add("3+4=", SHORT)
    driven.assert_scored("3+4=", driven.run_out()["3+4="].completions, SHORT)
    engine.close()
    assert names_in(temporary) == []


@pytest.mark.parametrize("amid", ["completions", "a version"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_loses_a_worker_fails_and_begins_again(
    model_dir: Path, number: signal.Signals, amid: str, others: list[psutil.Process]
) -> None:
    settings = settings_of("vllm-two-own", model_dir)
    config = SamplerConfig(model_dir=model_dir, threads=1, engine_step_limit_s=LIMIT_S, **settings)
    engine = RestartableEngine(partial(load_configured_engine, config))
    driven = Driven.of(engine, "in_place", model_dir)
    driven.add("3+4=", LONG, completions=4)
    while engine.waiting:
        driven.step()
    workers = workers_of(os.getpid(), but=others)
    assert len(workers) == 2
    workers[1].send_signal(number)
    failing = driven.run_out if amid == "completions" else partial(driven.take, driven.base)
    with pytest.raises((EngineEndedError, *FAULTS)):
        failing()
    engine.restart()
    assert engine.running == 0
    assert not any(worker.is_running() for worker in workers)
    driven.finished.clear()
    driven.take(driven.base)
    driven.add("5-2=", SHORT)
    assert set(driven.run_out()) == {"5-2="}
    engine.close()
    assert not workers_of(os.getpid(), but=others)


def test_workers_end_with_a_sampler_that_is_killed_even_those_that_hang(model_dir: Path) -> None:
    sampler = subprocess.Popen(
        [sys.executable, "-c", LOADED, str(model_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert sampler.stdout is not None
        assert any(line == b"loaded\n" for line in sampler.stdout)
        workers = workers_of(sampler.pid)
        assert len(workers) == 2
        workers[1].send_signal(signal.SIGSTOP)
    finally:
        sampler.kill()
        sampler.wait()
    assert psutil.wait_procs(workers, timeout=30)[1] == []
