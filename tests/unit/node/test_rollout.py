import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.errors import Reason
from node.values import limits
from node.values.groups.rollout import Finish
from node.values.groups.well_formed import check_group
from support.groups import SAMPLING, make_completion, make_group, with_replies
from support.refusals import refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"behaviour_logprob": np.array([-1, np.nan, -1], np.float32)}, Reason.NON_FINITE),
        ({"behaviour_logprob": np.array([-1, -np.inf, -1], np.float32)}, Reason.NON_FINITE),
        ({"behaviour_logprob": np.array([-1, 0.25, -1], np.float32)}, Reason.MALFORMED),
        ({"policy_version": np.array([1, -1, 1], np.int32)}, Reason.MALFORMED),
        ({"policy_version": np.array([-1, -1, -1], np.int32)}, Reason.MALFORMED),
        ({"policy_version": np.array([2, 2, 1], np.int32)}, Reason.MALFORMED),
        ({"token_ids": np.array([1, 2, 50], np.int32)}, Reason.MALFORMED),
        ({"token_ids": np.array([1, -2, 3], np.int32)}, Reason.MALFORMED),
        ({"kept_mass": np.array([0.5, np.nan, 0.5], np.float32)}, Reason.NON_FINITE),
        ({"kept_mass": np.array([0.5, np.inf, 0.5], np.float32)}, Reason.NON_FINITE),
        ({"kept_mass": np.array([0.5, 0.0, 0.5], np.float32)}, Reason.MALFORMED),
        ({"kept_mass": np.array([0.5, -0.5, 0.5], np.float32)}, Reason.MALFORMED),
        ({"kept_mass": np.array([0.5, 1.001, 0.5], np.float32)}, Reason.MALFORMED),
    ],
)
def test_one_bad_completion_refuses_the_group_and_is_named(changes: dict[str, Any], reason: Reason) -> None:
    is_truncated = "kept_mass" in changes
    group = make_group(
        completions=(
            make_completion(3, kept_mass=np.ones(3, np.float32) if is_truncated else None),
            make_completion(3, **changes),
        ),
        sampling=replace(SAMPLING, top_k=5 if is_truncated else 0),
    )
    with refused(reason, "completion 1"):
        check_group(group, vocabulary_size=50)


def test_a_completion_may_hold_replies_which_count_as_no_draws() -> None:
    completion = with_replies(make_completion(5), [True, False, False, True, True])
    group = make_group(completions=(completion, make_completion(2)))
    check_group(group, vocabulary_size=100)
    assert (completion.drawn_tokens, group.drawn_tokens, group.tokens) == (3, 5, 7)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_drawn": np.array([False, False, True, True])},
        {"is_drawn": np.array([True, False, True, False])},
        {"behaviour_logprob": np.full(4, -0.5, np.float32)},
        {"policy_version": np.array([0, 1, 1, 1], np.int32)},
        {"kept_mass": np.full(4, 0.5, np.float32)},
    ],
)
def test_a_reply_has_no_end_of_its_own_and_nothing_that_only_a_draw_has(changes: dict[str, Any]) -> None:
    honest = make_completion(4, kept_mass=np.full(4, 0.5, np.float32))
    completion = replace(with_replies(honest, [True, False, False, True]), **changes)
    group = make_group(completions=(completion,), sampling=replace(SAMPLING, top_k=5))
    with refused(Reason.MALFORMED, "completion 0"):
        check_group(group)


def test_negative_zero_and_denormal_logprobs_are_fine() -> None:
    logprob = np.array([-0.0, -1e-45, 0.0], np.float32)
    check_group(make_group(completions=(make_completion(3, behaviour_logprob=logprob),)))


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}])
def test_kept_masses_up_to_one_pass_where_something_was_cut_off(cut: dict[str, Any]) -> None:
    kept_mass = np.array([1e-45, 0.5, 1.0], np.float32)
    sampling = replace(SAMPLING, **cut)
    check_group(make_group(completions=(make_completion(3, kept_mass=kept_mass),), sampling=sampling))


@pytest.mark.parametrize(("top_k", "with_mass"), [(0, 1), (0, 2), (5, 1)])
def test_kept_masses_of_some_completions_or_where_nothing_was_cut_off_are_refused(
    top_k: int, with_mass: int
) -> None:
    masses = [np.ones(3, np.float32)] * with_mass + [None] * (2 - with_mass)
    completions = tuple(make_completion(3, kept_mass=kept_mass) for kept_mass in masses)
    with refused(Reason.MALFORMED, str(with_mass), "2"):
        check_group(make_group(completions=completions, sampling=replace(SAMPLING, top_k=top_k)))


@pytest.mark.parametrize(
    ("changes", "reason", "name"),
    [
        ({"completions": ()}, Reason.MALFORMED, "0 completions"),
        ({"prompt_token_ids": np.array([], np.int32)}, Reason.MALFORMED, "0 tokens"),
        ({"prompt_token_ids": np.array([50], np.int32)}, Reason.MALFORMED, "50"),
        ({"prompt_token_ids": np.array([-1], np.int32)}, Reason.MALFORMED, "-1"),
        ({"completions": (make_completion(reward=float("nan")),)}, Reason.NON_FINITE, "nan"),
        ({"completions": (make_completion(reward=float("-inf")),)}, Reason.NON_FINITE, "-inf"),
        ({"completions": (make_completion(reward=1e7),)}, Reason.OVER_LIMIT, "1e+07"),
        ({"graded_at_s": float("nan")}, Reason.NON_FINITE, "timestamps"),
        ({"sampling_started_at_s": float("inf")}, Reason.NON_FINITE, "timestamps"),
    ],
)
def test_a_group_that_breaks_a_rule_is_refused(changes: dict[str, Any], reason: Reason, name: str) -> None:
    with refused(reason, name):
        check_group(make_group(**changes), vocabulary_size=50)


@pytest.mark.parametrize(
    ("changes", "reason", "name"),
    [
        ({"actions": [0.5, np.nan]}, Reason.NON_FINITE, "completion 0"),
        ({"actions": [0.5, np.inf]}, Reason.NON_FINITE, "completion 0"),
        ({"actions": [0.5, 1.1]}, Reason.MALFORMED, "1.10"),
        ({"actions": [-0.1, 0.5]}, Reason.MALFORMED, "-0.1"),
        ({"behaviour_logprob": [1.0, 31.0]}, Reason.MALFORMED, "31.0"),
    ],
)
def test_real_actions_are_numbers_between_0_and_1_with_densities_that_can_be(
    changes: dict[str, list[float]], reason: Reason, name: str
) -> None:
    honest = {"actions": [0.0, 1.0], "behaviour_logprob": [2.5, -1.0]}
    arrays: dict[str, Any] = {k: np.array(v, np.float32) for k, v in (honest | changes).items()}
    group = make_group(completions=(make_completion(2, **arrays),))
    with refused(reason, name):
        check_group(group)
    fine: dict[str, Any] = {k: np.array(v, np.float32) for k, v in honest.items()}
    check_group(make_group(completions=(make_completion(2, **fine),)))


def test_ids_go_from_zero_to_the_end_of_the_vocabulary_where_it_is_known() -> None:
    ends = np.array([0, 49], np.int32)
    group = make_group(
        prompt_token_ids=ends, completions=(make_completion(2, token_ids=ends, policy_version=np.zeros(2)),)
    )
    check_group(group, vocabulary_size=50)
    with refused(Reason.MALFORMED, "48"):
        check_group(group, vocabulary_size=49)
    check_group(replace(group, prompt_token_ids=np.array([1 << 30], np.int32)))


@pytest.mark.parametrize(
    ("limit", "most", "reason"),
    [
        ("GROUP_COMPLETIONS", 2, Reason.MALFORMED),
        ("PROMPT_TOKENS", 4, Reason.MALFORMED),
        ("GROUP_TOKENS", 6, Reason.OVER_LIMIT),
    ],
)
def test_a_group_may_be_as_large_as_its_limits(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int, reason: Reason
) -> None:
    group = make_group(
        prompt_token_ids=np.ones(4, np.int32), completions=(make_completion(3), make_completion(3))
    )
    monkeypatch.setattr(limits, limit, most)
    check_group(group)
    monkeypatch.setattr(limits, limit, most - 1)
    with refused(reason):
        check_group(group)


def test_a_stop_string_ends_completions_only_where_the_run_has_some() -> None:
    stopped = make_completion(finish=Finish.STOP)
    check_group(make_group(completions=(stopped,), sampling=replace(SAMPLING, stop=("\n",))))
    with refused(Reason.MALFORMED, "completion 0"):
        check_group(make_group(completions=(stopped,)))


@pytest.mark.parametrize("finish", list(Finish))
def test_a_completion_is_finished_unless_the_limit_cut_it(finish: Finish) -> None:
    assert make_completion(finish=finish).is_finished == (finish is not Finish.LENGTH)


def test_staleness_is_counted_from_the_oldest_token() -> None:
    late = make_completion(3, policy_version=np.array([4, 5, 6], np.int32))
    group = make_group(completions=(make_completion(3, version=5), late))
    assert (group.oldest_version, group.newest_version) == (4, 6)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"a": [np.inf, 0]}, Reason.NON_FINITE),
        ({"A b": [0.5, 0.5]}, Reason.MALFORMED),
        ({"": [0.5, 0.5]}, Reason.MALFORMED),
        ({f"m{n}": [0.5, 0.5] for n in range(17)}, Reason.OVER_LIMIT),
    ],
)
def test_metrics_are_few_named_and_finite(metrics: dict[str, list[float]], reason: Reason) -> None:
    check_group(make_group(size=2, metrics={"a_1": np.array([0.5, np.nan], np.float32)}))
    with refused(reason):
        check_group(make_group(size=2, metrics={k: np.array(v, np.float32) for k, v in metrics.items()}))


def test_a_completion_without_a_reward_counts_neither_in_the_bounds_nor_in_the_mean() -> None:
    rewards = (0.25, math.nan, 1.0)
    metrics = {"length": np.array([1, 2, 3], np.float32)}
    group = make_group(
        completions=tuple(make_completion(2 + i, reward=r) for i, r in enumerate(rewards)), metrics=metrics
    )
    check_group(group)
    assert (group.header.least_reward, group.header.largest_reward) == (0.25, 1.0)
    assert group.reward_mean == 0.625
    taught = group.without_abstained()
    assert [one.reward for one in taught.completions] == [0.25, 1.0]
    assert taught.metrics["length"].tolist() == [1, 3]
    assert taught.without_abstained() is taught
