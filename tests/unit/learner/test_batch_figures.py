import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from learner.metrics import LearnerMetrics
from learner.step_log import RollbackLine
from learner.step_numbers import BatchFigures
from node.values.groups.rollout import Finish, RolloutGroup, mean_metrics
from node.values.limits import GROUP_METRICS
from node.values.run import RecommendedStaleness
from support.groups import make_completion, make_group
from support.step_lines import make_step_line


def group(*rewards: float, lengths: tuple[int, ...], cut: int = 0, prompt: int = 3) -> RolloutGroup:
    """Return a group whose first ``cut`` completions ended at the token limit."""
    completions = tuple(
        make_completion(length, reward=reward, finish=Finish.LENGTH if n < cut else Finish.END)
        for n, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    )
    return make_group(completions=completions, prompt_token_ids=np.ones(prompt, np.int32))


def test_lengths_cuts_and_spread_are_those_worked_by_hand() -> None:
    figures = BatchFigures.of(
        [
            group(1.0, 0.0, lengths=(1, 11), cut=1, prompt=2),
            group(0.5, 0.5, lengths=(2, 6), prompt=8),
        ],
        version=5,
    )
    assert (figures.completion_tokens_mean, figures.completion_tokens_max) == (5.0, 11)
    # Of 1, 2, 6, 11 the place 0.95 * 3 = 2.85.
    assert figures.completion_tokens_p95 == pytest.approx(6 + 0.85 * 5)
    assert figures.prompt_tokens_mean == 5.0
    assert figures.cut_ratio == 0.25
    assert figures.reward_deviation == 0.25  # (0.5 + 0) / 2
    assert figures.zero_advantage_ratio == 0.5


def test_equal_rewards_that_no_float_is_exactly_teach_nothing_and_a_stop_string_is_no_cut() -> None:
    same = group(0.1, 0.1, 0.1, lengths=(3, 3, 3))
    stopped = tuple(replace(one, finish=Finish.STOP) for one in same.completions)
    figures = BatchFigures.of([replace(same, completions=stopped)], version=5)
    assert (figures.zero_advantage_ratio, figures.cut_ratio) == (1.0, 0.0)


def test_a_grader_metric_is_a_mean_over_the_groups_that_have_it() -> None:
    columns = (
        {"words": [1.0, np.nan], "empty": [np.nan, np.nan]},
        {"words": [2.0, 6.0], "steps": [2.0, 2.0]},
    )
    groups = [
        make_group(metrics={name: np.array(values, np.float32) for name, values in of_group.items()})
        for of_group in columns
    ]
    means = mean_metrics(group.metric_means for group in groups)
    assert means == {"steps": 2.0, "words": 2.5}
    assert BatchFigures.of(groups, version=5).grader_metrics == means
    line = make_step_line(7, grader_metrics=means)
    assert line.gauges().items() >= {("grader_steps", 2.0), ("grader_words", 2.5)}
    assert json.loads(line.to_json())["grader_metrics"] == means


def test_names_that_one_sampler_made_up_do_not_displace_those_of_most_groups() -> None:
    ones = np.ones(2, np.float32)
    honest = [make_group(metrics={"words": ones}) for _ in range(2)]
    hostile = [make_group(metrics={f"a{n}_{m}": ones for m in range(GROUP_METRICS)}) for n in range(9)]
    means = mean_metrics(group.metric_means for group in [*hostile, *honest])
    assert len(means) == GROUP_METRICS
    assert "words" in means


def test_grader_metrics_of_the_newest_batch_alone_are_shown_by_name() -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    for of_step in ({"words": 2.5, "steps": 1.0}, {"words": 3.5}):
        metrics.show_step(make_step_line(7, grader_metrics=of_step))
        shown = {
            sample.labels["name"]: sample.value
            for family in registry.collect()
            if family.name == "heterorl_learner_grader_metric"
            for sample in family.samples
        }
        assert shown == of_step


def test_a_step_shows_the_same_numbers_in_gauges_and_in_its_line() -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    shown = {
        name: registry.get_sample_value(f"heterorl_learner_{name}")
        for name in ("reward_mean", "truncated_ratio")
    }
    assert all(math.isnan(value) for value in shown.values() if value is not None)
    line = make_step_line(7, recommended_staleness=RecommendedStaleness(16, "token weights"))
    metrics.show_step(line)
    numbers = line.gauges()
    assert numbers["tokens_per_second"] == 24.0
    assert "truncated_ratio" not in numbers
    for name, value in numbers.items():
        assert registry.get_sample_value(f"heterorl_learner_{name}") == value, name
    written = json.loads(line.to_json())
    same_name = numbers.keys() - {"clip_ratio", "tokens_per_second", "recommended_staleness_versions"}
    assert {name: written[name] for name in same_name} == {name: numbers[name] for name in same_name}


def test_a_report_has_the_steps_numbers_by_their_names() -> None:
    line = make_step_line(7, grader_metrics={"words": 2.5}, staleness_max_versions=3)
    written, report = json.loads(line.to_json()), asdict(line.report())
    assert report == {name: written[name] for name in report}
    assert (report["version"], report["staleness_max_versions"]) == (7, 3)


def test_a_rollbacks_line_has_no_number_and_consumed_no_group() -> None:
    line = RollbackLine(version=8, at_s=1.0, step_s=0.5, restored_version=3)
    written = json.loads(line.to_json())
    assert (written["version"], written["restored_version"], written["groups"]) == (8, 3, [])
    assert "kl_nats" not in written
