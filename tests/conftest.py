"""Set-up of every test process."""

import gc
import os
import signal

import pytest

pytest_plugins = ["support.needed_tools"]

# Before torch is imported, and inherited by the processes that tests start. The models are tiny and pytest
# runs a worker a core: more threads wait for each other (tests/unit/learner on two
# cores: 64 s, with one thread each 20 s).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under nohup it is ignored, by all that tests start too: a daemon would not drain when its terminal closes.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the system tests first: the longest, and most of what they do is waiting for processes."""
    items.sort(key=lambda item: item.path.parent.name != "system")


_module: object = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep the garbage collector off what earlier files imported: to go through it takes half a second."""
    global _module
    if (module := item.getparent(pytest.Module)) is not _module:
        _module = module
        gc.collect()
        gc.freeze()
