"""A learner and the store of what it signs, in a directory of the test."""

from pathlib import Path

import pytest

from node.weights.store.artifact_store import ArtifactStore
from support.weights import Learner


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.fixture
def store(learner: Learner, tmp_path: Path) -> ArtifactStore:
    return learner.store(tmp_path)
