"""Whose word on the number of prompts counts."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from node.coordinator.work.task_size import (
    NO_DATA,
    DataSeen,
    SizeAnswer,
    SizeWord,
    TaskSize,
    agreed_data,
    agreed_size,
    dispute,
    size_without,
)
from node.errors import ConfigError, Reason, RefusedError

KNOWN = TaskSize("t", 100, "s1")
ABSURD = TaskSize("t", 1 << 40, "liar")


def agree(
    known: TaskSize | None,
    *,
    prompts: int,
    configured: int | None = None,
    words: Mapping[str, int] | None = None,
    sampler_id: str = "s2",
) -> SizeAnswer:
    return agreed_size(
        known, task="t", configured=configured, words=words or {}, prompts=prompts, sampler_id=sampler_id
    )


@pytest.mark.parametrize("configured", [None, 100])
def test_the_first_sampler_that_says_so_is_noted(configured: int | None) -> None:
    assert agree(None, configured=configured, prompts=100).size == TaskSize("t", 100, "s2")
    assert agree(KNOWN, configured=configured, prompts=100).size is None


def test_what_is_configured_replaces_what_was_noted_once_a_sampler_agrees() -> None:
    assert agree(KNOWN, configured=150, prompts=150) == SizeAnswer(TaskSize("t", 150, "s2"))


def test_two_samplers_that_disagree_end_neither_and_the_third_decides() -> None:
    second = agree(ABSURD, prompts=100, words={"liar": 1 << 40})
    assert (second.size, second.word) == (None, SizeWord("s2", "t", 100))
    assert second.refusal is not None
    assert second.refusal.reason is Reason.TASK_UNDECIDED
    assert second.refusal.reason.is_retryable
    assert "revoke the one that is wrong" in second.refusal.fix
    words = {"liar": 1 << 40, "s2": 100}
    assert "1099511627776 by liar, 100 by s2; 1099511627776 are used" in dispute(ABSURD, words)
    third = agree(ABSURD, prompts=100, words=words, sampler_id="s3")
    assert (third.size, third.refusal) == (TaskSize("t", 100, "s3"), None)
    assert agree(third.size, prompts=100, words={**words, "s3": 100}) == SizeAnswer()


def test_the_majority_ends_a_sampler_with_another_task() -> None:
    late = agree(KNOWN, prompts=90, words={"s1": 100, "s3": 100})
    assert late.size is None
    assert late.refusal is not None
    assert late.refusal.reason is Reason.TASK_MISMATCH
    assert "has 90 prompts, this run has 100 since sampler s1 joined, as 2 samplers say" in late.refusal.what


def test_a_sampler_that_contradicts_its_own_word_ends() -> None:
    with pytest.raises(RefusedError) as error:
        agree(KNOWN, prompts=90, words={"s1": 100}, sampler_id="s1")
    assert error.value.reason is Reason.TASK_MISMATCH


def test_what_a_revoked_sampler_said_goes_with_it() -> None:
    taken = (SizeWord("liar", "t", 0),)
    assert size_without(ABSURD, {"liar": 1 << 40, "s2": 100}, {"liar"}) == (TaskSize("t", 100, "s2"), taken)
    assert size_without(ABSURD, {}, {"liar"}) == (TaskSize("t", 0, ""), taken)
    assert size_without(KNOWN, {"s1": 100, "liar": 7}, {"liar"}) == (None, taken)
    assert size_without(KNOWN, {"s1": 100}, {"another"}) == (None, ())


def test_a_disagreement_with_what_is_configured_names_both_numbers_and_the_fix() -> None:
    with pytest.raises(RefusedError) as error:
        agree(KNOWN, configured=100, prompts=90)
    assert error.value.reason is Reason.TASK_MISMATCH
    assert "coordinator.prompts = 100, and task 't' of sampler s2 has 90 prompts" in error.value.what
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
