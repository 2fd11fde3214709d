"""Fixtures of a run's identities and files.

The ``conftest.py`` of a folder imports those that its tests share.
"""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.identity import MadeRun, make_run


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"), now=time.time())


@pytest.fixture
def made(made_once: MadeRun, tmp_path: Path) -> MadeRun:
    """Return a copy of one run: to make one takes 15 ms of a core."""
    directory = shutil.copytree(made_once.directory, tmp_path / made_once.run_id)
    return replace(made_once, directory=directory)
