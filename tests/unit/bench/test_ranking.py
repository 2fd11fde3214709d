"""The ranking laboratory: its baselines, its promises, and a few versions of a simulated run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.ranking import lost_points, violations
from bench.ranking_lab.baselines import LEAVE_ONE_OUT, OBJECTIVES
from bench.ranking_lab.daemon_run import FAR, NEAR, Outcome
from bench.ranking_lab.staleness import EVALUATIONS, STALENESS, Cell, Curve, simulate
from deploy.real.topics import encoder_directory, write_topics
from learner.objective.batch import ObjectiveBatch
from learner.objective.registry import load_objective

ADVANTAGES = {
    "none": [1.0, 0.5, 0.0, 0.25],
    "batch mean": [0.5625, 0.0625, -0.4375, -0.1875],
    LEAVE_ONE_OUT: [0.5, -0.5, -0.25, 0.25],
}
"""For two groups of two, with rewards 1, 1/2 and 0, 1/4."""

GOOD = Outcome(
    baseline=LEAVE_ONE_OUT,
    seed=0,
    elapsed_s=1.0,
    versions=480,
    first=0.5,
    last=0.95,
    held_out_base=0.47,
    held_out=0.97,
    tenths=(),
    staleness_versions={NEAR: (9, 1.0), FAR: (1, 20.0)},
    broken=(),
)


def curves(*lost: float) -> list[Curve]:
    return [
        Curve(seed, staleness, "drift_aware", (0.5, *[0.99 - cost] * 3), 0)
        for seed, each in enumerate(lost)
        for staleness, cost in zip(STALENESS, (0.0, each), strict=True)
    ]


@pytest.mark.parametrize("baseline", OBJECTIVES)
def test_baselines_differ_in_the_advantage_alone(baseline: str) -> None:
    logprob = torch.full((4, 3), -1.0, dtype=torch.float64, requires_grad=True)
    batch = ObjectiveBatch(
        learner_logprob=logprob,
        behaviour_logprob=logprob.detach(),
        mask=torch.ones(4, 3, dtype=torch.bool),
        group_index=torch.tensor([0, 0, 1, 1]),
        reward=torch.tensor([1.0, 0.5, 0.0, 0.25], dtype=torch.float64),
        staleness_versions=torch.zeros(4, dtype=torch.int64),
        max_tokens=3,
    )
    objective = load_objective(OBJECTIVES[baseline])
    assert objective.is_separable
    (gradient,) = torch.autograd.grad(objective(batch).loss, logprob)
    advantage = torch.tensor(ADVANTAGES[baseline], dtype=torch.float64)
    torch.testing.assert_close(gradient, -advantage[:, None].expand(4, 3) / 12)


def test_a_run_that_learned_and_lost_little_at_the_largest_staleness_kept_every_promise() -> None:
    assert lost_points(curves(0.03, -0.01, 0.01)) == pytest.approx(1.0)
    assert violations([GOOD, replace(GOOD, baseline="none", last=0.7)], curves(0.03, -0.01, 0.01)) == []


@pytest.mark.parametrize(
    ("changes", "lost", "says"),
    [
        ({"last": 0.89}, 0.0, "nDCG 0.5 to 0.89"),
        ({"held_out": 0.89}, 0.0, "held out 0.47 to 0.89"),
        ({"first": 0.61}, 0.0, "promised are at most 0.6"),
        ({"broken": ("no group twice: one was",)}, 0.0, "no group twice"),
        ({"staleness_versions": {NEAR: (9, 1.0), FAR: (0, float("nan"))}}, 0.0, "groups were not trained on"),
        ({}, 0.021, "staleness 64 costs 2.10 points"),
    ],
)
def test_a_promise_that_was_not_kept_is_named(changes: dict[str, object], lost: float, says: str) -> None:
    [found] = violations([replace(GOOD, **changes)], curves(lost))  # type: ignore[arg-type]
    assert says in found


def test_a_simulated_run_is_the_same_twice_and_stale_groups_make_another(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    write_topics(data)
    model = encoder_directory(tmp_path / "model")
    cell = Cell(0, 0, 12, model, data, held_out=4, learning_rate=1e-3)
    fresh, again, stale = (simulate(one) for one in (cell, cell, replace(cell, staleness=8)))
    assert fresh == again
    assert len(fresh.held_out) == EVALUATIONS + 1
    assert (fresh.objective, fresh.idle_steps) == ("drift_aware", 0)
    assert stale.held_out[0] == fresh.held_out[0]
    assert stale.held_out != fresh.held_out
