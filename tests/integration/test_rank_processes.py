"""A daemon that starts the other ranks, and what it says when it loses one."""

import json
import multiprocessing
from pathlib import Path

import pytest

from support.rank_processes import lead
from support.tiny_model import make_tiny_model


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, layers=2)


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_a_rank_that_is_told_takes_the_same_steps_and_is_named_when_it_stops_or_dies(
    layout: dict[str, int], model_dir: Path, tmp_path: Path
) -> None:
    first = multiprocessing.get_context("spawn").Process(
        target=lead, args=(layout, model_dir, tmp_path / "told")
    )
    first.start()
    first.join()
    assert first.exitcode == 0
    told = json.loads((tmp_path / "told").read_text())
    # Masters differ by the rounding of float32 sums, which a few words of bfloat16 show.
    assert told["differing_words"] < 0.01
    stopped, killed = told["said"]
    assert f"rank 1 (process {told['pid']}) is stopped: continue it with kill -CONT" in stopped
    assert f"rank 1 (process {told['pid']}) was killed" in killed
