from pathlib import Path

import pytest

from support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model, which no test writes to."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)
