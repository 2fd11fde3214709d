"""``python -m bench.mutants.worker``, in a copy of the repository: runs tests against faults, one by one.

What all tests import from third parties is imported once. Each fault then gets a process of its own, forked,
which runs its tests until the first fails. Reads and writes lines of JSON.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest

PRELOADED: Final = (
    "blake3",
    "cryptography.x509",
    "grpc.aio",
    "hypothesis.internal.conjecture.engine",
    "hypothesis.stateful",
    "hypothesis.strategies",
    "numpy.testing",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pytest_asyncio.plugin",
    "rich.table",
    "safetensors.torch",
    "sqlite3",
    "torch",
    "transformers.models.qwen3",
    "uvloop",
    "xxhash",
    "zstandard",
)
OPTIONS: Final = ("-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:terminal")
MEMORY_BYTES: Final = 6 << 30


class Selection:
    """Runs some tests of those that were collected, in a given order, and remembers which one failed."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._place = {test: place for place, test in enumerate(wanted)}
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def preload() -> None:
    """Import what takes long and is not under test."""
    hypothesis.settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
    hypothesis.settings.load_profile("mutants")
    for name in PRELOADED:
        importlib.import_module(name)


def run_tests(tests: Sequence[str], base_temp: Path) -> dict[str, Any]:
    """Run tests in this process; return the first that failed."""
    selection = Selection(tests)
    files = sorted({test.partition("::")[0] for test in tests})
    code = pytest.main([*OPTIONS, f"--basetemp={base_temp}", *files], plugins=[selection])
    return {"code": int(code), "failed": selection.failed}


def judge(
    path: Path, source: str, tests: Sequence[str], *, timeout_s: float, base_temp: Path
) -> dict[str, Any]:
    """Run tests in a process of their own with another text of one file."""
    original = path.read_text()
    began_s = time.monotonic()
    path.write_text(source)
    # Python takes a cached module for good if its time and size are those of the source.
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()
    try:
        verdict = _forked(tests, timeout_s=timeout_s, base_temp=base_temp)
    finally:
        path.write_text(original)
        shutil.rmtree(base_temp, ignore_errors=True)
    return verdict | {"seconds": round(time.monotonic() - began_s, 2)}


def _forked(tests: Sequence[str], *, timeout_s: float, base_temp: Path) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        _quiet()
        seconds = int(timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            os.write(writing, json.dumps(run_tests(tests, base_temp)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with open(reading, "rb") as answers:
            verdict = _answer(answers.fileno(), timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return verdict


def _answer(descriptor: int, timeout_s: float) -> dict[str, Any]:
    ready, _, _ = select.select([descriptor], [], [], timeout_s)
    if not ready:
        return {"code": -1, "failed": "(no end)"}
    answer = os.read(descriptor, 1 << 16)
    return json.loads(answer) if answer else {"code": -2, "failed": "(the process died)"}


def _quiet() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def main() -> None:
    """Judge what is asked for on standard input until it ends."""
    sys.dont_write_bytecode = True
    os.environ["OMP_NUM_THREADS"] = "1"
    preload()
    copy = Path.cwd()
    print(json.dumps({"ready": True}), flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        verdict = judge(
            copy / asked["path"],
            asked["source"],
            asked["tests"],
            timeout_s=asked["timeout_s"],
            base_temp=copy / f".temp-{number}",
        )
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
