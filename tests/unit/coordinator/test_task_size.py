"""Whose word on the number of prompts counts."""

from dataclasses import replace

import pytest

from node.coordinator.work.task_size import NO_DATA, DataSeen, TaskSize, agreed_data, agreed_size
from node.errors import ConfigError, Reason, RefusedError

KNOWN = TaskSize("t", 100, "s1")


def agree(known: TaskSize | None, *, configured: int | None, prompts: int) -> TaskSize | None:
    return agreed_size(known, task="t", configured=configured, prompts=prompts, sampler_id="s2")


@pytest.mark.parametrize("configured", [None, 100])
def test_the_first_sampler_that_says_so_is_noted(configured: int | None) -> None:
    assert agree(None, configured=configured, prompts=100) == TaskSize("t", 100, "s2")
    assert agree(KNOWN, configured=configured, prompts=100) is None


def test_what_is_configured_replaces_what_was_noted_once_a_sampler_agrees() -> None:
    assert agree(KNOWN, configured=150, prompts=150) == TaskSize("t", 150, "s2")


@pytest.mark.parametrize(
    ("configured", "said"),
    [
        (100, "coordinator.prompts = 100, and task 't' of sampler s2 has 90 prompts"),
        (None, "has 90 prompts, this run has 100 since sampler s1 joined"),
    ],
)
def test_a_disagreement_names_both_numbers_and_the_fix(configured: int | None, said: str) -> None:
    with pytest.raises(RefusedError) as error:
        agree(KNOWN, configured=configured, prompts=90)
    assert error.value.reason is Reason.TASK_MISMATCH
    assert said in error.value.what
    assert "coordinator.prompts = 90" in error.value.fix


SEEN = DataSeen(b"d" * 16, 100, 10, held_out_at=90)


@pytest.mark.parametrize(
    "now", [NO_DATA, replace(SEEN, digest=b"e" * 16), replace(SEEN, evaluation_rows=20, held_out_at=80)]
)
def test_a_run_that_has_leased_keeps_its_data(now: DataSeen) -> None:
    assert agreed_data(SEEN, SEEN, known_part=SEEN.digest, next_slot=5) is None
    assert agreed_data(SEEN, now, known_part=b"", next_slot=0) == now
    with pytest.raises(
        ConfigError, match=r"began with 100 rows, digest 646464646464, 10 held out from row 90"
    ):
        agreed_data(SEEN, now, known_part=now.digest, next_slot=5)


def test_rows_may_be_added_and_are_asked_for_from_the_next_slot_on() -> None:
    more = replace(SEEN, digest=b"e" * 16, rows=120)
    grown = agreed_data(SEEN, more, known_part=SEEN.digest, next_slot=5)
    assert grown == replace(more, first_slot=5)
    assert agreed_data(grown, more, known_part=more.digest, next_slot=9) is None
    for wrong in (replace(more, held_out_at=110), replace(more, evaluation_rows=0), replace(more, rows=99)):
        with pytest.raises(ConfigError, match="rows may only be added at the end of file"):
            agreed_data(SEEN, wrong, known_part=SEEN.digest, next_slot=5)
    with pytest.raises(ConfigError, match="this run began with 100 rows"):
        agreed_data(SEEN, more, known_part=b"f" * 16, next_slot=5)


def test_a_run_that_began_without_data_goes_on_without() -> None:
    with pytest.raises(ConfigError, match="this run began with no data"):
        agreed_data(NO_DATA, SEEN, known_part=b"", next_slot=5)
