"""Which prompts are kept from whom, and for how long."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from node.coordinator.work.slots import bad_prompts as slots_bad_prompts
from node.coordinator.work.slots.bad_prompts import LONGEST_RETRY_S, Aside, BadPrompts, PromptFacts, Report
from node.values.fact import Gone
from node.values.groups.failure import BadPrompt, Failure
from support.present import present

MANY = 1 << 20
BOTH = ("a", "b")


@pytest.fixture
def bad_prompts() -> BadPrompts:
    return BadPrompts(retry_s=600)


def fail(
    bad_prompts: BadPrompts,
    prompt_index: int = 7,
    *,
    now: float,
    by: Sequence[str] = BOTH,
    prompts: int = MANY,
    slot: int = 0,
) -> BadPrompt | None:
    """Report a prompt that samplers failed; return its entry."""
    fail_unseen(bad_prompts, prompt_index, now=now, by=by, prompts=prompts, slot=slot)
    return next((entry for entry in bad_prompts.newest(MANY) if entry.prompt_index == prompt_index), None)


def fail_unseen(
    bad_prompts: BadPrompts,
    prompt_index: int,
    *,
    now: float,
    by: Sequence[str] = BOTH,
    prompts: int = MANY,
    slot: int = 0,
) -> None:
    report = Report(prompt_index, tuple(by), Failure.PROMPT_FAILED, "x", slot)
    apply(bad_prompts, bad_prompts.after([report], prompts=prompts, now=now))


def apply(bad_prompts: BadPrompts, facts: PromptFacts) -> None:
    for fact in facts:
        bad_prompts.apply(fact)


def retry_at_s(entry: BadPrompt | None) -> float:
    assert entry is not None
    return entry.retry_at_s


def test_what_one_sampler_failed_is_kept_from_it_alone_and_what_two_failed_from_everybody(
    bad_prompts: BadPrompts,
) -> None:
    fail(bad_prompts, by=["a"], now=0)
    assert [bad_prompts.aside(7, name, now=599) for name in "abc"] == [Aside.FOR_IT, Aside.NOT, Aside.NOT]
    fail(bad_prompts, by=["b"], now=100)
    assert [bad_prompts.aside(7, name, now=699) for name in "abc"] == [Aside.FOR_ALL] * 3
    assert [bad_prompts.aside(7, name, now=700) for name in "abc"] == [Aside.NOT] * 3


def test_a_prompt_is_aside_for_a_time_that_doubles(bad_prompts: BadPrompts) -> None:
    assert retry_at_s(fail(bad_prompts, now=0)) == 600
    assert retry_at_s(fail(bad_prompts, now=700)) == 700 + 1200
    assert retry_at_s(fail(bad_prompts, now=2000)) == 2000 + 2400


def test_the_word_of_one_sampler_doubles_nothing_however_often_it_is_said(bad_prompts: BadPrompts) -> None:
    for now in range(0, 60_000, 600):
        assert retry_at_s(fail(bad_prompts, by=["a"], now=now)) == now + 600
        assert retry_at_s(fail(bad_prompts, by=["a"], now=now + 1)) == now + 600
    assert retry_at_s(fail(bad_prompts, now=60_000)) == 60_600


@pytest.mark.parametrize(("retry_s", "longest_s"), [(600, LONGEST_RETRY_S), (200_000, 200_000), (0, 0)])
def test_pauses_have_an_end(retry_s: float, longest_s: float) -> None:
    bad_prompts, now = BadPrompts(retry_s=retry_s), 0.0
    for _ in range(100):
        entry = fail(bad_prompts, now=now)
        pause_s = retry_at_s(entry) - now
        now = retry_at_s(entry)
    assert pause_s == longest_s


def test_never_is_more_than_half_of_the_prompts_aside_and_those_aside_longest_come_first(
    bad_prompts: BadPrompts,
) -> None:
    for n in range(8):
        fail(bad_prompts, n, now=n, prompts=8)
    assert [n for n in range(8) if bad_prompts.aside(n, "c", now=8) is Aside.NOT] == [0, 1, 2, 3]
    restored = BadPrompts(bad_prompts.newest(MANY), retry_s=600)
    assert restored.newest(MANY) == bad_prompts.newest(MANY)


def test_a_sampler_is_kept_from_no_more_than_half_of_the_prompts_and_costs_others_none(
    bad_prompts: BadPrompts,
) -> None:
    fail(bad_prompts, 9, now=0, prompts=10)
    for n in range(9):
        fail(bad_prompts, n, now=n + 1, by=["a"], prompts=10)
    assert sum(bad_prompts.aside(n, "a", now=10) is not Aside.NOT for n in range(10)) == 5
    assert {bad_prompts.aside(n, "c", now=10) for n in range(9)} == {Aside.NOT}


def test_a_prompt_of_a_task_with_one_is_never_aside(bad_prompts: BadPrompts) -> None:
    assert fail(bad_prompts, 0, now=0, prompts=1) is None


def test_a_success_makes_it_a_prompt_like_any_other(bad_prompts: BadPrompts) -> None:
    fail(bad_prompts, now=0)
    apply(bad_prompts, bad_prompts.lifted(7, 8))
    assert 7 not in bad_prompts
    assert retry_at_s(fail(bad_prompts, now=1000)) == 1600


def test_only_a_sampler_that_was_alone_with_its_word_of_late_is_contradicted(bad_prompts: BadPrompts) -> None:
    fail(bad_prompts, 1, by=["a"], now=0)
    fail(bad_prompts, 2, now=0)
    assert bad_prompts.contradicted(1, "b", now=1) == ("a",)
    assert bad_prompts.contradicted(1, "a", now=1) == ()
    assert bad_prompts.contradicted(1, "b", now=600) == ()
    assert bad_prompts.contradicted(2, "c", now=1) == bad_prompts.contradicted(3, "c", now=1) == ()


def test_what_a_sampler_said_can_be_taken_back(bad_prompts: BadPrompts) -> None:
    fail(bad_prompts, 1, by=["a"], now=0)
    fail(bad_prompts, 2, now=0)
    fail(bad_prompts, 3, by=["b"], now=0)
    apply(bad_prompts, bad_prompts.without({"a"}))
    assert {bad.prompt_index: bad.said_by for bad in bad_prompts.newest(9)} == {2: ("b",), 3: ("b",)}
    assert bad_prompts.aside(2, "c", now=1) is Aside.NOT
    assert set(bad_prompts.without(None)) == {Gone("bad_prompt", "2"), Gone("bad_prompt", "3")}


def test_a_restart_takes_pauses_from_the_configuration_of_now(bad_prompts: BadPrompts) -> None:
    entry = present(fail(bad_prompts, now=100))
    stored = replace(entry, retry_at_s=0.0)
    assert BadPrompts([stored], retry_s=600).newest(1)[0].retry_at_s == 700
    assert BadPrompts([stored], retry_s=0).aside(7, "c", now=100) is Aside.NOT


def test_a_clock_that_was_ahead_keeps_no_prompt_aside(bad_prompts: BadPrompts) -> None:
    fail(bad_prompts, now=1_000_000_000)
    assert bad_prompts.aside(7, "c", now=0) is Aside.NOT


def test_the_newest_are_shown_first_and_the_oldest_forgotten(
    bad_prompts: BadPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 8
    monkeypatch.setattr(slots_bad_prompts, "BAD_PROMPTS", most)
    for number in range(most + 2):
        fail_unseen(bad_prompts, number, now=number)
    fail_unseen(bad_prompts, 2, now=most + 1000)
    assert len(bad_prompts) == most
    assert [bad.prompt_index for bad in bad_prompts.newest(2)] == [2, most + 1]
    assert 1 not in bad_prompts
    fail_unseen(bad_prompts, most + 2, now=most + 1001)
    assert 2 in bad_prompts  # the oldest to be abandoned first, and the newest to be abandoned last
    assert 3 not in bad_prompts
