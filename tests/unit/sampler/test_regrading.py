"""The texts that a verifier grades, and how it compares rewards."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from node.kinds.ranking.task import METRICS
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import Finish, RolloutGroup
from node.wire.rollouts import group_from_wire, group_to_wire
from sampler.rollouts.regrading import TOLERANCE, compared, completion_texts, misstated_finish
from support.groups import make_group


def claiming(*rewards: float) -> RolloutGroup:
    group = make_group("7.1", size=len(rewards))
    completions = (replace(one, reward=r) for one, r in zip(group.completions, rewards, strict=True))
    return replace(group, completions=tuple(completions))


def test_a_grader_is_shown_what_it_was_shown_before() -> None:
    group = claiming(0.0)
    stopped = replace(group, sampling=replace(group.sampling, stop=("\n\n",)))
    (text,) = completion_texts(stopped, ["answer\n\nand more"])
    (one,) = group.completions
    assert (text.text, text.tokens, text.finish, text.conversation) == (
        "answer",
        len(one.token_ids),
        one.finish.value,
        (),
    )


@pytest.mark.parametrize(
    ("finish", "last", "text", "odd"),
    [
        (Finish.END, 7, "text", ""),
        (Finish.END, 8, "text", "completion 0 claims to have ended, and has no end token"),
        (Finish.STOP, 8, "a;b", ""),
        (Finish.STOP, 8, "ab", "completion 0 claims to have been stopped, and has no stop string"),
        (Finish.LENGTH, 8, "ab", ""),
    ],
)
def test_a_completion_can_have_ended_as_it_says(finish: Finish, last: int, text: str, odd: str) -> None:
    group = claiming(0.0)
    (one,) = group.completions
    ids = np.append(one.token_ids[:-1], np.int32(last))
    group = replace(
        group,
        completions=(replace(one, token_ids=ids, finish=finish),),
        sampling=replace(group.sampling, stop=(";",)),
    )
    assert misstated_finish(group, [text], frozenset({7})) == odd


def test_a_ranking_ends_without_an_end_token() -> None:
    assert misstated_finish(claiming(0.0), ["1 0"], None) == ""


@pytest.mark.parametrize("reward", [0.1, 1.0, 1000.0])
def test_rounding_on_the_way_is_no_difference_and_ten_times_as_much_is(reward: float) -> None:
    rounded = reward + TOLERANCE / 2 * max(1.0, reward)
    for claimed in (reward, rounded):
        assert compared(claiming(claimed), [reward]) == RewardFinding("7.1", RewardCheck.AGREED)
    other = reward + 10 * TOLERANCE * max(1.0, reward)
    assert compared(claiming(other), [reward]).outcome is RewardCheck.DISAGREED


@pytest.mark.parametrize("metric", ["ndcg", "mrr", "recall"])
def test_an_honest_grader_repeats_its_rewards_across_the_wire(metric: str) -> None:
    """Rewards travel as float32; those of a ranking have no short binary fraction."""
    relevance = [3, 0.1, 0, 7, 1 / 3, 2, 0]
    rewards = [METRICS[metric](relevance, order, 3) for order in permutations(range(7), 3)]
    assert len(set(rewards)) > 1
    arrived = group_from_wire(group_to_wire(claiming(*rewards)))
    assert compared(arrived, rewards).outcome is RewardCheck.AGREED
    slanted = replace(arrived.completions[0], reward=arrived.completions[0].reward + 1e-5)
    lying = replace(arrived, completions=(slanted, *arrived.completions[1:]))
    assert compared(lying, rewards).outcome is RewardCheck.DISAGREED


def test_a_finding_names_a_few_completions_with_the_values() -> None:
    finding = compared(claiming(1.0, 1.0, 1.0, 1.0, 0.5), [0.0] * 5)
    assert finding.outcome is RewardCheck.DISAGREED
    assert finding.detail == (
        "completion 0 claims 1, the grader gives 0; completion 1 claims 1, the grader gives 0; "
        "completion 2 claims 1, the grader gives 0, and 2 more"
    )


@pytest.mark.parametrize(
    ("claimed", "given", "said"),
    [
        ((math.nan, 1.0), (math.nan, 1.0), ""),
        ((0.0, 1.0), (math.nan, 1.0), "completion 0 claims 0, the grader gives no reward"),
        ((math.nan, 1.0), (0.5, 1.0), "completion 0 claims no reward, the grader gives 0.5"),
    ],
)
def test_to_abstain_is_an_answer_that_can_be_checked(
    claimed: tuple[float, ...], given: tuple[float, ...], said: str
) -> None:
    finding = compared(claiming(*claimed), given)
    assert finding.outcome is (RewardCheck.DISAGREED if said else RewardCheck.AGREED)
    assert finding.detail == said
