"""Completions that come twice, and those that may by chance."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from learner.intake import copies as intake
from learner.intake.copies import COPIES, LEAST_NATS, Copies
from node.values.groups.rollout import Completion, RolloutGroup
from support.groups import make_group


def group_of(
    group_id: str, *draws: int, sampler_id: str = "s1", nats: float = LEAST_NATS, tokens: int = 16
) -> RolloutGroup:
    """Return a group whose completions are what random generators of these seeds drew."""
    group = make_group(group_id, size=len(draws))
    completions = tuple(
        _drawn(one, seed, nats, tokens) for one, seed in zip(group.completions, draws, strict=True)
    )
    return replace(group, completions=completions, sampler_id=sampler_id)


def _drawn(one: Completion, seed: int, nats: float, tokens: int) -> Completion:
    return replace(
        one,
        token_ids=np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32),
        behaviour_logprob=np.full(tokens, -nats / tokens, np.float32),
        policy_version=np.zeros(tokens, np.int32),
    )


def test_a_completion_that_comes_again_in_another_group_is_a_copy_and_names_the_first() -> None:
    copies = Copies()
    assert copies.add(group_of("1.1", 1, 2)) == ""
    assert copies.add(group_of("2.1", 3, 2, sampler_id="s2")) == (
        "completion 1 is that of group 1.1, which s1 drew"
    )


def test_a_mask_that_comes_again_is_a_copy_and_another_one_of_the_same_density_is_none() -> None:
    def masks(group_id: str, first: float) -> RolloutGroup:
        actions = np.linspace(first, 0.9, 16, dtype=np.float32)
        group = group_of(group_id, 1, nats=0.0)
        return replace(group, completions=(replace(group.completions[0], actions=actions),))

    copies = Copies()
    assert copies.add(masks("1.1", 0.1)) == ""
    assert copies.add(masks("2.1", 0.2)) == ""
    assert copies.add(masks("3.1", 0.1)).startswith("completion 0 is that of group 1.1")


BY_CHANCE = group_of("2.1", 1, nats=LEAST_NATS - 1)
ELSEWHERE = replace(group_of("2.1", 1), prompt_token_ids=np.array([9, 9], np.int32))


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (group_of("1.1", 1), group_of("1.1", 1)),
        (replace(BY_CHANCE, group_id="1.1"), BY_CHANCE),
        (group_of("1.1", 1), ELSEWHERE),
    ],
    ids=["delivered again", "may come by chance", "of another prompt"],
)
def test_what_comes_again_is_not_always_a_copy(first: RolloutGroup, again: RolloutGroup) -> None:
    copies = Copies()
    assert copies.add(first) == ""
    assert copies.add(again) == ""


def test_a_sampler_is_a_copier_after_some_groups_and_not_once_it_is_forgiven() -> None:
    copies = Copies()
    copies.add(group_of("0.1", 7))
    for number in range(COPIES):
        assert not copies.is_copier("s2")
        assert copies.add(group_of(f"{number + 1}.1", 7, sampler_id="s2"))
    assert copies.is_copier("s2")
    assert not copies.is_copier("s1")
    copies.forgive("s2")
    assert not copies.is_copier("s2")


def test_a_whole_group_that_comes_again_is_a_copy_although_none_of_its_completions_proves_it() -> None:
    copies = Copies()
    assert copies.add(group_of("1.1", 1, 2, 3, nats=LEAST_NATS / 2)) == ""
    assert copies.add(group_of("2.1", 1, 2, 3, nats=LEAST_NATS / 2)) == "it is group 1.1 again"
    assert copies.add(group_of("3.1", 1, 3, 2, nats=LEAST_NATS / 2)) == ""


def short(group_id: str, sampler_id: str, *draws: int, prompt: int = 0, nats: float = 1.5) -> RolloutGroup:
    """Return a group of one-token answers to one of several prompts."""
    group = group_of(group_id, *draws, sampler_id=sampler_id, nats=nats, tokens=1)
    return replace(group, prompt_token_ids=np.array([prompt], np.int32))


def test_a_sampler_that_repeats_one_short_group_in_ten_is_found() -> None:
    copies, random = Copies(), np.random.default_rng(0)
    repeated = 0
    for number in range(2000):
        if copies.is_copier("s1"):
            break
        prompt, is_again = number % 50, number > 100 and number % 10 == 0
        draws = [prompt] * 6 if is_again or number < 50 else random.integers(100, 900, 6).tolist()
        said = copies.add(short(f"{number}.1", "s1", *draws, prompt=prompt))
        repeated += is_again
    assert copies.is_copier("s1")
    assert f"again, and so are {repeated - 1} of its" in said
    assert repeated < 20
    copies.forgive("s1")
    assert not copies.is_copier("s1")


@pytest.mark.parametrize("sure", [0.5, 0.9, 0.99])
def test_an_honest_sampler_is_not_taken_for_a_copier_however_sure_the_policy_is(
    sure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "FALSE_ALARM", 100 * intake.FALSE_ALARM)  # a hundredth of the proof would do
    copies, random = Copies(), np.random.default_rng(0)

    @functools.cache
    def drawn(prompt: int, *answers: bool) -> RolloutGroup:
        group = short("0.1", "s1", *map(int, answers), prompt=prompt)
        nats = -np.log(np.where(answers, sure, 1.0 - sure)).astype(np.float32)
        completions = (
            replace(one, behaviour_logprob=-own[None])
            for one, own in zip(group.completions, nats, strict=True)
        )
        return replace(group, completions=tuple(completions))

    for number in range(6_000):
        group = drawn(number % 7, *(random.random(4) < sure).tolist())
        assert copies.add(replace(group, group_id=f"{number}.1")) == ""
        assert not copies.is_copier("s1")


def test_memory_is_bounded_and_the_oldest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "COMPLETIONS", 4)
    copies = Copies()
    for n in range(4):
        assert copies.add(group_of(f"{n}.1", n)) == ""
    assert copies.add(group_of("4.1", 0))
    assert copies.add(group_of("5.1", 9)) == ""
    assert copies.add(group_of("6.1", 0)) == ""
    assert copies.add(group_of("7.1", 3))
