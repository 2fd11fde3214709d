"""One seed at one staleness: the learner's steps and the sampler's engine in one process, by turns.

    version v:  words of v - staleness -> engine -> groups -> Trainer -> version v + 1

Objective, step, drift, scorer, engine and grader are production's; the versions between are not waited for.
"""

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.ranking_lab.ranker import Ranker, read_rows
from learner.config import LearnerConfig
from learner.journal.progress import Progress
from learner.model.model import Policy, load_policy
from learner.step.step_inputs import next_step
from learner.step.trainer import Trainer

STALENESS: Final = (0, 64)
VERSIONS: Final = 500
EVALUATIONS: Final = 10
"""Evenly spaced, the last after the last version."""
LAST: Final = 3
"""Evaluations whose mean is where a run ends."""

GROUPS: Final = 8
GROUP_SIZE: Final = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """All that determines a run."""

    seed: int
    staleness: int
    versions: int
    model: Path
    data: Path
    held_out: int
    """Rows at the end of the data that are never trained on."""
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean nDCG of the likeliest rankings of the held-out rows, the base model's first."""

    seed: int
    staleness: int
    objective: str
    held_out: tuple[float, ...]
    idle_steps: int
    """Batches that taught nothing."""

    @property
    def end(self) -> float:
        """The mean of the last evaluations."""
        return float(np.mean(self.held_out[-LAST:]))


def simulate(cell: Cell) -> Curve:
    """Train for so many versions with the default objective."""
    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    rows = read_rows(cell.data)
    train, held_out = rows[: -cell.held_out], rows[-cell.held_out :]
    config = LearnerConfig(model_dir=cell.model, learning_rate=cell.learning_rate)
    policy = load_policy(cell.model, device="cpu")
    trainer = Trainer(policy, config)
    sampler, judge = (Ranker(cell.model, seed=cell.seed) for _ in range(2))
    kept: deque[NDArray[np.uint16]] = deque(maxlen=cell.staleness + 1)
    draw = random.Random(cell.seed)
    scores, idle = [judge.score(held_out)], 0
    evaluated_at = np.linspace(0, cell.versions, EVALUATIONS + 1).round().astype(int)[1:].tolist()
    for version in range(cell.versions):
        kept.append(_words_of(policy))
        behaviour = max(0, version - cell.staleness)
        sampler.serve(behaviour, kept[0])
        chosen = [draw.choice(train) for _ in range(GROUPS)]
        groups = sampler.groups(chosen, GROUPS * version, size=GROUP_SIZE)
        outcome = trainer.step(next_step(groups, config, Progress(version)))
        idle += not outcome.is_applied
        if version + 1 in evaluated_at:
            judge.serve(version + 1, _words_of(policy))
            scores.append(judge.score(held_out))
    return Curve(cell.seed, cell.staleness, config.objective, tuple(round(s, 4) for s in scores), idle)


def _words_of(policy: Policy) -> NDArray[np.uint16]:
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    return words
