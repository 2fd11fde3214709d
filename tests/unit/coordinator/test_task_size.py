"""Whose word on the number of prompts counts."""

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


SEEN = DataSeen(b"d" * 16, 100, 10)


@pytest.mark.parametrize("now", [NO_DATA, DataSeen(b"e" * 16, 100, 10), DataSeen(b"d" * 16, 100, 20)])
def test_a_run_that_has_leased_keeps_its_data(now: DataSeen) -> None:
    assert agreed_data(SEEN, SEEN, has_leased=True) is None
    assert agreed_data(SEEN, now, has_leased=False) == now
    with pytest.raises(ConfigError, match=r"began with 100 rows, digest 646464646464, the last 10 held out"):
        agreed_data(SEEN, now, has_leased=True)


def test_a_run_that_began_without_data_goes_on_without() -> None:
    with pytest.raises(ConfigError, match="this run began with no data"):
        agreed_data(NO_DATA, SEEN, has_leased=True)
