"""Set-up of every test process."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest_plugins = ["support.needed_tools", "support.warm_processes", "support.databases", "support.durations"]

# Byte code is kept, whatever the environment says: hundreds of processes would each compile all of ours.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before torch is imported, and inherited by the processes that tests start. The models are tiny and pytest
# runs a worker a core: more threads wait for each other (tests/unit/learner on two
# cores: 64 s, with one thread each 20 s).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What tests expect was computed on CPUs: device = "auto" sees no GPU, unless the caller names one.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# As in every daemon, before grpc is imported: its fork handlers abort some of the graders that tests start.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if find_spec("hypothesis"):  # not where `make test-vllm` runs
    from hypothesis import settings

    # Examples of a property that does not say how many. A deadline would fail on a machine that is busy.
    settings.register_profile("test", max_examples=60, deadline=None)
    settings.register_profile("deep", max_examples=2000, deadline=None)
    settings.load_profile("test")

# Tests sync thousands of files, which shows nothing unless a disk's power is cut: crash tests have a model of
# that (support/crashes.py). A file and its folder cost 0.7 ms of a core on ext4, and 15 us in memory.
MEMORY = Path("/dev/shm")
if (
    "TMPDIR" not in os.environ
    and MEMORY.is_dir()
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC  # some tests compile programs
    and shutil.disk_usage(MEMORY).free > 4 << 30
):
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# Under nohup it is ignored, by all that tests start too: a daemon would not drain when its terminal closes.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker begin to collect elsewhere: the first compiles a module, and the others read it."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and [Path(arg).resolve() for arg in config.args] == [TESTS]:
        places = sorted({*TESTS.glob("[a-z]*/"), *TESTS.glob("unit/[a-z]*")} - {TESTS / "unit"})
        first = len(places) * int(worker) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args[:] = map(str, places[first:] + places[:first])


SYSTEM = frozenset({"system", "upgrade"})
"""Folders whose tests run many processes."""

LONG = frozenset(
    {
        "test_engine_restarts.py",
        "test_hostile_graders.py",
        "test_rank_layouts.py",
        "test_rank_processes.py",
        "test_staleness_command.py",
    }
)
"""Files that take longest, besides those folders."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Begin with what takes longest: with the system tests on one worker, with the others on the next.

    Each worker gets an equal part of the list, which is the same for all whatever they collected first; one
    that has finished takes from the ends of others'.
    """
    items.sort(key=lambda item: item.path)
    yield
    system = [item for item in items if item.path.parent.name in SYSTEM]
    long = [item for item in items if item.path.name in LONG]
    short = [item for item in items if item.path.parent.name not in SYSTEM and item.path.name not in LONG]
    of_one_worker = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    of_first = max(0, of_one_worker - len(system))
    items[:] = [*system, *short[:of_first], *long, *short[of_first:]]


_module: object = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep the garbage collector off what earlier files imported: to go through it takes half a second."""
    global _module
    if (module := item.getparent(pytest.Module)) is not _module:
        _module = module
        gc.collect()
        gc.freeze()
