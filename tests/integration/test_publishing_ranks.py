"""Four ranks publish what one process would, byte for byte, and none has more words than its share."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
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
    "dp_shard": ((1, 4, 1), 4),
}
"""Meshes and numbers of layers."""
MEASURED: Final = "dp_shard"
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


@pytest.fixture(scope="module")
def published(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what publishes a case, once, and returns where; what is measured has ranks of its own."""

    @cache
    def of_case(name: str) -> Path:
        directory = tmp_path_factory.mktemp("published")
        with Ranks(RANKS) if name == MEASURED else nullcontext(ranks) as its:
            its.run(publish_beside_one_process, directory, *CASES[name], name == MEASURED)
        return directory

    return of_case


def content(directory: Path) -> dict[str, bytes]:
    complete = (directory / "published" / "complete").glob("*/*")
    files = [directory / "base.words", *complete]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


@pytest.mark.parametrize("name", CASES)
def test_deltas_keyframes_merged_deltas_and_those_after_a_restart_are_those_of_one_process(
    published: Callable[[str], Path], name: str
) -> None:
    shared, alone = (content(published(name) / which) for which in ("shared", "alone"))
    assert sorted({path.split("/")[2] for path in shared if "/" in path}) == [
        *("1-0", "2-1", "2-key", "3-0", "3-1", "3-2", "4-3"),
    ]
    assert shared == alone


@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_and_a_number_that_is_not_finite_are_told_as_by_one_process_and_change_nothing(
    published: Callable[[str], Path], name: str
) -> None:
    said = json.loads((published(name) / "said.json").read_text())
    assert said[:2] == said[2:]
    assert said[0] == "no room"
    assert said[1].startswith("tensor 'model.norm.weight' has a NaN or an infinity at element 0")


def test_a_rank_reads_a_quarter_of_the_model_files(ranks: Ranks, tmp_path: Path) -> None:
    model_of(1).save_pretrained(tmp_path / "model")
    ranks.run(read_own_slices, tmp_path)
    for rank in range(RANKS):
        read, whole = json.loads((tmp_path / f"read-{rank}.json").read_text())
        assert 0 < read <= 1.1 / RANKS * whole


def test_a_rank_has_a_quarter_of_the_words_and_a_few_frames_under_way(
    published: Callable[[str], Path],
) -> None:
    for rank in range(RANKS):
        for held in json.loads((published(MEASURED) / f"held-{rank}.json").read_text()):
            assert held["words"] <= 1.1 / RANKS * held["whole"]
            assert held["peak"] <= 1.1 / RANKS * held["whole"] + 2 * FRAME_WORDS * UNDER_WAY_FRAMES
