"""Which prompts are passed over, and for how long."""

from dataclasses import replace

import pytest

from node.coordinator.work.bad_prompts import BAD_PROMPTS, LONGEST_RETRY_S, BadPrompts
from node.failure import BadPrompt, Failure


def abandon(bad_prompts: BadPrompts, prompt_index: int = 7, *, now: float, slot: int = 0) -> BadPrompt:
    bad = bad_prompts.abandoned(prompt_index, reason=Failure.PROMPT_FAILED, detail="x", slot=slot, now=now)
    bad_prompts.apply([bad], lifted=())
    return bad


def test_a_prompt_is_passed_over_for_a_time_that_doubles() -> None:
    bad_prompts = BadPrompts(retry_s=600)
    assert not bad_prompts.is_aside(7, now=0)
    assert abandon(bad_prompts, now=0).retry_at_s == 600
    assert bad_prompts.is_aside(7, now=599)
    assert not bad_prompts.is_aside(7, now=600)
    assert 7 in bad_prompts
    assert abandon(bad_prompts, now=700).retry_at_s == 700 + 1200
    assert [abandon(bad_prompts, now=0).times for _ in range(3)] == [3, 4, 5]


@pytest.mark.parametrize(("retry_s", "longest_s"), [(600, LONGEST_RETRY_S), (200_000, 200_000), (0, 0)])
def test_pauses_have_an_end(retry_s: float, longest_s: float) -> None:
    bad_prompts = BadPrompts(retry_s=retry_s)
    for _ in range(100):
        bad = abandon(bad_prompts, now=0)
    assert bad.retry_at_s == longest_s


def test_a_success_makes_it_a_prompt_like_any_other() -> None:
    bad_prompts = BadPrompts(retry_s=600)
    abandon(bad_prompts, now=0)
    bad_prompts.apply((), lifted=[7, 8])
    assert 7 not in bad_prompts
    assert abandon(bad_prompts, now=1000).times == 1


def test_a_restart_takes_pauses_from_the_configuration_of_now() -> None:
    bad_prompts = BadPrompts(retry_s=600)
    stored = replace(abandon(bad_prompts, now=100), retry_at_s=0.0)
    assert BadPrompts([stored], retry_s=600).newest(1)[0].retry_at_s == 700
    assert not BadPrompts([stored], retry_s=0).is_aside(7, now=100)


def test_a_clock_that_was_ahead_keeps_no_prompt_aside() -> None:
    bad_prompts = BadPrompts(retry_s=600)
    abandon(bad_prompts, now=1_000_000_000)
    assert not bad_prompts.is_aside(7, now=0)


def test_the_newest_are_shown_first_and_the_oldest_forgotten() -> None:
    bad_prompts = BadPrompts(retry_s=600)
    for number in range(BAD_PROMPTS + 2):
        abandon(bad_prompts, number, now=number)
    abandon(bad_prompts, 2, now=BAD_PROMPTS + 2)
    assert len(bad_prompts) == BAD_PROMPTS
    assert [bad.prompt_index for bad in bad_prompts.newest(2)] == [2, BAD_PROMPTS + 1]
    assert 1 not in bad_prompts
    assert bad_prompts.aside(0) <= 1
    abandon(bad_prompts, BAD_PROMPTS + 2, now=BAD_PROMPTS + 3)
    assert 2 in bad_prompts  # the oldest to be abandoned first, and the newest to be abandoned last
    assert 3 not in bad_prompts
