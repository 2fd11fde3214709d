"""One line for many groups."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import Verdict
from sampler.rollouts.group_tally import LOG_EVERY_S, GroupTally
from support.groups import make_group
from support.present import present


@pytest.fixture
def group() -> RolloutGroup:
    return replace(make_group(), sampling_started_at_s=100.0, sampling_finished_at_s=102.0, graded_at_s=102.5)


def rewarded(group: RolloutGroup, reward: float) -> RolloutGroup:
    return replace(group, completions=tuple(replace(one, reward=reward) for one in group.completions))


def add(tally: GroupTally, group: RolloutGroup, verdict: Verdict, *, now: float) -> dict[str, Any] | None:
    tally.made(group)
    return tally.answered(group.group_id, verdict, now=now)


def test_a_thousand_groups_within_the_interval_are_told_once(group: RolloutGroup) -> None:
    tally = GroupTally(now=100.0)
    told = [add(tally, group, Verdict.SPOOLED, now=100.0 + LOG_EVERY_S * n / 1000) for n in range(1, 1001)]
    assert told[:-1] == [None] * 999
    last = present(told[-1])
    assert (last["groups"], last["within_s"], last["verdicts"]) == (1000, LOG_EVERY_S, {"spooled": 1000})
    assert (last["tokens"], last["reward_mean"]) == (1000 * group.tokens, 0.5)
    assert (last["sampled_s"], last["graded_s"]) == (2.0, 0.5)
    assert tally.rest(now=100.0 + LOG_EVERY_S) is None


def test_the_rest_is_told_when_the_sampler_stops_with_the_versions_of_all() -> None:
    tally = GroupTally(now=0.0)
    for version, reward, verdict in (
        (7, 1.0, Verdict.SPOOLED),
        (5, 0.0, Verdict.DUPLICATE),
        (9, 0.5, Verdict.SPOOLED),
        (8, 0.5, Verdict.SPOOLED),
    ):
        add(tally, rewarded(make_group(version=version), reward), verdict, now=1.0)
    rest = present(tally.rest(now=5.0))
    assert (rest["groups"], rest["within_s"], rest["reward_mean"]) == (4, 5.0, 0.5)
    assert rest["verdicts"] == {"spooled": 3, "duplicate": 1}
    assert (rest["oldest_version"], rest["newest_version"]) == (5, 9)


def test_means_are_rounded_for_the_line_they_are_told_in(group: RolloutGroup) -> None:
    tally = GroupTally(now=100.0)
    for reward_mean, took_s in ((1.0, 2.0), (0.0, 2.0), (0.0, 2.001)):
        finished_s = 100.0 + took_s
        timed = replace(group, sampling_finished_at_s=finished_s, graded_at_s=finished_s + took_s / 3)
        add(tally, rewarded(timed, reward_mean), Verdict.SPOOLED, now=101.0)
    told = present(tally.rest(now=112.34))
    assert (told["within_s"], told["reward_mean"], told["sampled_s"], told["graded_s"]) == (
        12.3,
        0.3333,
        2.0,
        0.667,
    )


def test_graders_metrics_are_logged_as_means_over_the_groups_that_have_them() -> None:
    tally = GroupTally(now=0.0)
    for words, steps in (([1.0, np.nan], None), ([3.0, 5.0], [2.0, 2.0])):
        metrics = {"words": words} | ({} if steps is None else {"steps": steps})
        columns = {name: np.array(values, np.float32) for name, values in metrics.items()}
        add(tally, make_group(size=2, metrics=columns), Verdict.SPOOLED, now=1.0)
    assert present(tally.rest(now=2.0))["metrics"] == {"steps": 2.0, "words": 2.5}


def test_a_group_counts_once_it_is_answered_and_not_if_it_is_refused_for_good() -> None:
    tally = GroupTally(now=0.0)
    for name in ("waits", "refused", "spooled"):
        tally.made(make_group(name))
    assert tally.answered("refused", None, now=1.0) is None
    assert tally.rest(now=2.0) is None
    assert tally.answered("spooled", Verdict.SPOOLED, now=3.0) is None
    told = present(tally.rest(now=4.0))
    assert (told["groups"], told["verdicts"]) == (1, {"spooled": 1})
