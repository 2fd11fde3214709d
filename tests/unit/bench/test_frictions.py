"""Frictions do what they say, to the share of groups they say, and to nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.friction_tasks import FRICTIONS, FrictionTask
from bench.frictions import Line, applies, paired, read, run, tables
from bench.staleness_lab.cells import Setting
from bench.staleness_lab.codes import Codes
from bench.staleness_lab.plan import Row, cell_of
from bench.staleness_lab.tasks import Completions, Task

SEEDS = (0, 1, 2)
GROUPS = 500


@pytest.fixture(scope="module")
def task() -> Task:
    """Eight signs, of which a policy without weights draws each alike."""
    return Codes(8, groups=GROUPS)


def drawn(task: Task, friction: str, seeds: tuple[int, ...] = SEEDS) -> tuple[Completions, Completions]:
    """Return the groups of one version under a friction, and the same without."""
    faulty = FrictionTask(task, FRICTIONS[friction])
    theta = faulty.start(seeds)
    prompt = torch.arange(GROUPS).remainder(task.prompts).expand(len(seeds), -1)
    uniform = torch.stack(
        [
            torch.rand(GROUPS, task.group_size, task.tokens, generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
    )
    return faulty.sample(theta, prompt, uniform), task.sample(theta, prompt, uniform)


def changed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return in which groups two tensors differ, [seeds, groups]."""
    return (one != other).flatten(2).any(-1)


def recorded(completions: Completions) -> torch.Tensor:
    """Return what actors say of their tokens, nats."""
    return completions.log_probability.gather(-1, completions.token.unsqueeze(-1)).squeeze(-1)


def test_without_friction_nothing_changes(task: Task) -> None:
    faulty, honest = drawn(task, "none")
    assert torch.equal(faulty.token, honest.token)
    assert torch.equal(faulty.reward, honest.reward)
    assert torch.equal(faulty.log_probability, honest.log_probability)


@pytest.mark.parametrize(
    ("friction", "share"), [("rewards inverted, .1", 0.1), ("rewards inverted, .3", 0.3)]
)
def test_a_share_of_the_groups_has_all_rewards_inverted_and_nothing_else(
    task: Task, friction: str, share: float
) -> None:
    faulty, honest = drawn(task, friction)
    is_changed = changed(faulty.reward, honest.reward)
    assert is_changed.float().mean().item() == pytest.approx(share, abs=0.04)
    assert torch.equal(faulty.reward[is_changed], 1 - honest.reward[is_changed])
    assert torch.equal(faulty.token, honest.token)
    assert torch.equal(faulty.log_probability, honest.log_probability)


def test_noisy_logprobs_are_off_by_half_a_nat_in_a_third_of_the_groups(task: Task) -> None:
    faulty, honest = drawn(task, "logprobs + N(0, .5), 1/3")
    off = recorded(faulty) - recorded(honest)
    is_changed = changed(recorded(faulty), recorded(honest))
    assert is_changed.float().mean().item() == pytest.approx(1 / 3, abs=0.05)
    assert off[is_changed].std().item() == pytest.approx(0.5, abs=0.01)
    assert off[is_changed].mean().item() == pytest.approx(0, abs=0.01)
    assert torch.equal(faulty.token, honest.token)
    assert torch.equal(faulty.reward, honest.reward)


@pytest.mark.parametrize(
    ("friction", "nats"), [("logprobs all -.001, 1/3", -0.001), ("logprobs all -10, 1/3", -10)]
)
def test_constant_logprobs_are_constant_in_a_third_of_the_groups(
    task: Task, friction: str, nats: float
) -> None:
    faulty, honest = drawn(task, friction)
    is_changed = changed(recorded(faulty), recorded(honest))
    assert is_changed.float().mean().item() == pytest.approx(1 / 3, abs=0.05)
    assert torch.all(recorded(faulty)[is_changed] == nats)
    assert torch.equal(faulty.reward, honest.reward)


def test_random_tokens_are_uniform_and_honestly_recorded_and_rewarded(task: Task) -> None:
    faulty, honest = drawn(task, "random tokens, 1/3")
    is_changed = changed(recorded(faulty), recorded(honest))
    assert is_changed.float().mean().item() == pytest.approx(1 / 3, abs=0.05)
    assert torch.allclose(recorded(faulty)[is_changed], torch.tensor(1 / 8).log())
    shares = torch.bincount(faulty.token[is_changed].flatten()).double() / faulty.token[is_changed].numel()
    assert shares.tolist() == pytest.approx([1 / 8] * 8, abs=0.01)
    assert honest.reward[is_changed].mean().item() > 0.05
    assert faulty.reward[is_changed].mean().item() < 0.005
    assert torch.equal(faulty.reward[~is_changed], honest.reward[~is_changed])


def test_rare_rewards_are_for_one_completion_in_a_hundred_at_the_start(task: Task) -> None:
    faulty, _ = drawn(task, "rare: start at .01")
    assert faulty.reward.mean().item() == pytest.approx(0.01, abs=0.005)
    assert task.score(task.start(SEEDS)).min().item() > 0.05


def test_which_groups_are_faulty_depends_on_the_seed_alone(task: Task) -> None:
    together, _ = drawn(task, "logprobs + N(0, .5), 1/3")
    alone, _ = drawn(task, "logprobs + N(0, .5), 1/3", seeds=SEEDS[1:2])
    assert torch.allclose(recorded(together)[1], recorded(alone)[0], atol=1e-5)
    is_same = recorded(together)[0] == recorded(together)[1]
    assert not bool(is_same.all())


def test_logprobs_do_not_move_dg_and_rewards_do() -> None:
    cell = replace(
        cell_of("letters", Row("fixed", 2), "dg", Setting(), seeds=SEEDS), task="codes8", versions=30
    )
    task = Codes(8)
    ends = {friction: run(cell, task, friction).ends for friction in FRICTIONS}
    assert ends["logprobs all -.001, 1/3"] == ends["logprobs + N(0, .5), 1/3"] == ends["none"]
    assert ends["rewards inverted, .3"] != ends["none"]


def test_lines_are_read_as_written_and_compared_seed_by_seed(tmp_path: Path) -> None:
    assert read(tmp_path / "none.jsonl") == []
    line = Line(
        "letters", 8, "none", "dg", "rate x 1", (0.5, 0.7, 0.9), (0.1,) * 3, (9, None, 3), 9, 0.0, 1.0
    )
    lower = replace(line, ends=(0.4, 0.5, 0.9))
    mean, low, high = paired(lower, line)
    assert mean == pytest.approx(-0.1)
    assert high - mean == pytest.approx(mean - low) == pytest.approx(4.302653 * 0.1 / np.sqrt(3), rel=1e-5)
    assert not applies("rare: start at .01", "maze")
    assert next(iter(tables([]))) == "\n0 cells, 0 s of processor time"
