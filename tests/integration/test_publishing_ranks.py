"""Four ranks publish what one process would, byte for byte, and none has more words than its share."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from learner.ranks.words.frame_work import ROUND_FRAMES
from support.rank_processes import Ranks
from support.shared_frames import FRAME_WORDS, model_of, publish_beside_one_process, read_own_slices

RANKS: Final = 4
CASES: Final = {
    "tp and dp_shard": ((1, 2, 2), 1),
    "dp_replicate and dp_shard": ((2, 2, 1), 1),
    "pp and tp": ((1, 1, 2, 2), 2),
}
MEASURED: Final = ((1, 4, 1), 4)
"""Meshes and numbers of layers."""
UNDER_WAY_FRAMES: Final = 12 * ROUND_FRAMES
"""Two rounds: words received and sent, payloads alone and joined, and what coding a frame takes."""


pytestmark = [
    pytest.mark.needs("kernel"),  # without it, coding all these frames takes minutes
    pytest.mark.timeout(400),  # four processes, on two cores that other tests use too
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as ranks:
        yield ranks


def content(directory: Path) -> dict[str, bytes]:
    complete = (directory / "published" / "complete").glob("*/*")
    files = [directory / "base.words", *complete]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def check_files(directory: Path) -> None:
    """Compare the files that ranks left with those of one process: all of their history."""
    shared, alone = (content(directory / which) for which in ("shared", "alone"))
    assert sorted({path.split("/")[2] for path in shared if "/" in path}) == [
        *("1-0", "2-1", "2-key", "3-0", "3-1", "3-2", "4-3"),
    ]
    assert shared == alone


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_ranks_publish_and_say_of_failures_is_that_of_one_process(
    ranks: Ranks, tmp_path: Path, case: tuple[tuple[int, ...], int]
) -> None:
    """Deltas, keyframes and merged ones, also after a restart; a full disk, a number that is not finite."""
    ranks.run(publish_beside_one_process, tmp_path, *case, False)
    check_files(tmp_path)
    said = json.loads((tmp_path / "said.json").read_text())
    assert said[:2] == said[2:]
    assert said[0] == "no room"
    assert said[1].startswith("tensor 'model.norm.weight' has a NaN or an infinity at element 0")


def test_a_rank_reads_a_quarter_of_the_model_files(ranks: Ranks, tmp_path: Path) -> None:
    model_of(1).save_pretrained(tmp_path / "model")
    ranks.run(read_own_slices, tmp_path)
    for rank in range(RANKS):
        read, whole = json.loads((tmp_path / f"read-{rank}.json").read_text())
        assert 0 < read <= 1.1 / RANKS * whole


def test_a_rank_has_a_quarter_of_the_words_and_a_few_frames_under_way(tmp_path: Path) -> None:
    with Ranks(RANKS) as measured:  # for good: what counts allocations is never stopped
        measured.run(publish_beside_one_process, tmp_path, *MEASURED, True)
    check_files(tmp_path)
    for rank in range(RANKS):
        for held in json.loads((tmp_path / f"held-{rank}.json").read_text()):
            assert held["words"] <= 1.1 / RANKS * held["whole"]
            assert held["peak"] <= 1.1 / RANKS * held["whole"] + 2 * FRAME_WORDS * UNDER_WAY_FRAMES
