"""A run's coordinator, for tests that know it by its rpcs alone: whatever is inside may change."""

import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.hub import RunningHub, running_hub
from support.identity import MadeRun, make_run


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"), now=time.time())


@pytest.fixture
def made(made_once: MadeRun, tmp_path: Path) -> MadeRun:
    """Return a run that was made a moment ago, in a directory of the test's own."""
    directory = tmp_path / made_once.run_id
    shutil.copytree(made_once.directory, directory)
    return replace(made_once, directory=directory)


@pytest.fixture
async def hub(made: MadeRun) -> AsyncIterator[RunningHub]:
    async with running_hub(made) as hub:
        yield hub
