"""Completions that come twice, and those that may by chance."""

from dataclasses import replace

import numpy as np

from learner.intake.copies import COMPLETIONS, COPIES, LEAST_NATS, Copies
from node.rollout import Completion, RolloutGroup
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


def test_the_same_group_may_be_delivered_again() -> None:
    copies = Copies()
    assert copies.add(group_of("1.1", 1)) == ""
    assert copies.add(group_of("1.1", 1)) == ""


def test_what_may_come_twice_by_chance_is_no_copy() -> None:
    copies = Copies()
    assert copies.add(group_of("1.1", 1, nats=LEAST_NATS - 1)) == ""
    assert copies.add(group_of("2.1", 1, nats=LEAST_NATS - 1)) == ""


def test_the_same_completion_of_another_prompt_is_no_copy() -> None:
    copies = Copies()
    copies.add(group_of("1.1", 1))
    other = replace(group_of("2.1", 1), prompt_token_ids=np.array([9, 9], np.int32))
    assert copies.add(other) == ""


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


def test_memory_is_bounded_and_the_oldest_is_forgotten_first() -> None:
    copies = Copies()
    copies.add(group_of("old.1", 1, tokens=1))
    for n in range(COMPLETIONS):
        copies._seen[n.to_bytes(12, "big")] = ("other", "s1")
    copies.add(group_of("new.1", 2))
    assert len(copies._seen) == COMPLETIONS
    assert copies.add(group_of("again.1", 1, tokens=1)) == ""
