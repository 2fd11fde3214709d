"""The laboratory of several learners: equal work, and one learner that is merged with nobody."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.learners import quick_cells
from bench.learners_lab.arms import ONE_LEARNER, TASKS, Arm, Cell, Outcome, TaskPlan, arms
from bench.learners_lab.exchange import Exchange
from bench.learners_lab.report import write_report
from bench.learners_lab.simulation import MergedRun, simulate
from bench.staleness_lab import cells as staleness
from bench.staleness_lab.batched import Shapes
from bench.staleness_lab.lander import Lander
from bench.staleness_lab.methods import Method
from bench.staleness_lab.safes import Safes
from bench.staleness_lab.simulation import simulate as simulate_staleness
from learner.merging.merge_settings import MergeSettings

SEEDS = (0, 1)


def test_one_learner_is_the_staleness_laboratorys_with_fresh_groups() -> None:
    found = simulate(Cell("safes", ONE_LEARNER, TaskPlan(160, 0.05, 1.0, ()), SEEDS), Safes())
    alone = staleness.Cell(
        task="safes",
        method="drift_aware",
        setting=staleness.Setting(),
        recipe="",
        delay="fixed",
        staleness=0,
        mismatch="none",
        learning_rate=0.05,
        seeds=SEEDS,
        versions=40,
    )
    known = simulate_staleness(alone, Safes(), Method.named("drift_aware"))
    assert [curve[-1] for curve in found.scores] == [curve[-1] for curve in known.scores]
    assert found.rounds == 40


@pytest.mark.parametrize("overlap", ["wait", "eager", "delayed"])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_every_step_of_a_learner_that_is_alone_is_in_the_version_at_the_end(
    overlap: str, fragments: int, alone: bool
) -> None:
    settings = MergeSettings.model_validate(
        {
            "method": "in_step",
            "overlap": overlap,
            "fragments": fragments,
            "trains_a_fragment": alone and fragments > 1,
        }
    )
    run = MergedRun(
        torch.zeros(1, 6, dtype=torch.float64),
        Shapes({"a": (1,), "b": (2,), "c": (3,)}),
        settings,
        learners=1,
    )
    due = []
    for number in range(6):
        moved = run.trained(number)
        columns = torch.arange(6) if moved is None else run.columns[moved]
        run.local[:, :, columns] += 2.0**number
        due.append(columns)
        run.finish_round(number)
    run.flush()
    for number in range(6, 6 + fragments):  # what was trained since a fragment's turn
        run.finish_round(number)
    run.flush()
    expected = torch.zeros(6, dtype=torch.float64)
    for number, columns in enumerate(due):
        expected[columns] += 2.0**number
    assert torch.equal(run.version[0], expected)


def test_two_learners_in_step_take_the_mean_of_their_steps() -> None:
    run = MergedRun(torch.zeros(1, 2), Shapes({"a": (2,)}), MergeSettings(method="in_step"), learners=2)
    run.local += torch.tensor([[[1.0, 0.0]], [[0.0, -4.0]]])
    run.finish_round(0)
    assert run.version.tolist() == [[0.5, -2.0]]
    assert run.local.tolist() == [[[0.5, -2.0]], [[0.5, -2.0]]]


@pytest.mark.parametrize("compression", ["full", "four_bit", "low_rank", "largest", "word_changes"])
def test_changes_arrive_in_fewer_bytes_and_what_is_left_over_arrives_later(compression: str) -> None:
    shapes = Shapes({"a": (16, 16), "b": (16,)})
    settings = MergeSettings.model_validate({"compression": compression, "share": 0.2, "rank": 4})
    exchange = Exchange(settings, shapes, learners=2, seeds=3)
    generator = torch.Generator().manual_seed(1)
    version = torch.randn(3, shapes.size, generator=generator)
    change = 0.01 * torch.randn(2, 3, shapes.size, generator=generator, dtype=torch.float64)
    rounds = 40
    arrived = sum(exchange.carried(change, ["a", "b"], version) for _ in range(rounds))
    assert isinstance(arrived, torch.Tensor)
    assert torch.linalg.vector_norm(arrived / rounds - change) < 0.25 * torch.linalg.vector_norm(change)
    full_bytes = 4 * shapes.size * rounds
    if compression == "full":
        assert exchange.sent_bytes == full_bytes
    else:
        assert 0 < exchange.sent_bytes < full_bytes / 2


def test_all_arms_consume_all_groups_in_whole_rounds_under_names_of_their_own() -> None:
    for plan in TASKS.values():
        for arm in arms(plan):
            assert plan.groups % (Lander.groups * arm.learners * arm.settings.local_steps) == 0
    keys = [cell.key for cell in quick_cells()]
    assert len(set(keys)) == len(keys)


def test_a_report_has_every_arm_that_ran(tmp_path: Path) -> None:
    plan = TaskPlan(128, 0.01, 1.0, (4,))
    chosen = [ONE_LEARNER, Arm("in_step", 2, MergeSettings(method="in_step")), *list(arms(plan))[-3:]]
    outcomes = [simulate(Cell("safes", arm, plan, SEEDS), Safes()) for arm in chosen]
    assert [Outcome.of_line(outcome.to_line()) for outcome in outcomes] == outcomes
    assert outcomes[1].sent_bytes == 4 * outcomes[1].entries * outcomes[1].rounds
    write_report(tmp_path / "learners.md", outcomes)
    text = (tmp_path / "learners.md").read_text()
    assert "in_step, 2 learners" in text
    assert "0.7/0.9, delayed" in text
    assert (outcomes[0].groups_to(outcomes[0].scores_mean[0] - 1) == 0).all()
    assert np.isinf(outcomes[0].groups_to(1.1)).all()
    assert replace(outcomes[0], name="x").key != outcomes[0].key
