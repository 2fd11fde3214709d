"""What a verifier makes of a group: the texts that its grader saw, and how rewards compare."""

from dataclasses import replace

import pytest

from node.rollout import RewardCheck, RewardFinding, RolloutGroup
from sampler.rollouts.regrading import TOLERANCE, compared, completion_texts
from support.groups import make_group


def claiming(*rewards: float) -> RolloutGroup:
    group = make_group("7.1", size=len(rewards))
    completions = (replace(one, reward=r) for one, r in zip(group.completions, rewards, strict=True))
    return replace(group, completions=tuple(completions))


def test_a_grader_is_shown_what_it_was_shown_before() -> None:
    group = claiming(0.0)
    stopped = replace(group, sampling=replace(group.sampling, stop=("\n\n",)))
    (text,) = completion_texts(stopped, lambda ids: f"{len(ids)} tokens\n\nand more")
    (one,) = group.completions
    assert (text.text, text.tokens, text.finish, text.conversation) == (
        f"{len(one.token_ids)} tokens",
        len(one.token_ids),
        one.finish.value,
        (),
    )


def test_equal_rewards_agree() -> None:
    assert compared(claiming(0.0, 1.0), [0.0, 1.0]) == RewardFinding("7.1", RewardCheck.AGREED)


@pytest.mark.parametrize("reward", [0.1, 1.0, 1000.0])
def test_rounding_on_the_way_is_no_difference_and_ten_times_as_much_is(reward: float) -> None:
    rounded = reward + TOLERANCE / 2 * max(1.0, reward)
    assert compared(claiming(rounded), [reward]).outcome is RewardCheck.AGREED
    other = reward + 10 * TOLERANCE * max(1.0, reward)
    assert compared(claiming(other), [reward]).outcome is RewardCheck.DISAGREED


def test_a_finding_names_a_few_completions_with_the_values() -> None:
    finding = compared(claiming(1.0, 1.0, 1.0, 1.0, 0.5), [0.0] * 5)
    assert finding.outcome is RewardCheck.DISAGREED
    assert finding.detail == (
        "completion 0 claims 1, the grader gives 0; completion 1 claims 1, the grader gives 0; "
        "completion 2 claims 1, the grader gives 0, and 2 more"
    )
