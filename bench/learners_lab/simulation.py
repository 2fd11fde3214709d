"""One cell: learners train on groups of the newest version, and their changes become the next one.

    round r     groups drawn from version v -> H Adam steps at each learner, from where it stands -> changes
    wait        they are merged at once, and every learner goes on from version v + 1
    eager       they are merged at the end of round r + 1; each learner goes on from where it stands
    delayed     likewise; each goes on from version v

All seeds of all learners are rows of one parameter matrix. What merges them is ``learner.merging.formulas``.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.learners_lab.arms import Cell, Outcome
from bench.learners_lab.exchange import Exchange
from bench.staleness_lab.batched import Adam, Shapes
from bench.staleness_lab.methods import Method
from bench.staleness_lab.seeds import Rows, pull, runs_at_once
from bench.staleness_lab.tasks import Task
from learner.merging.formulas.fragments import Fragments
from learner.merging.formulas.outer_step import mean_change, outer_step
from learner.merging.formulas.overlap import rebased
from learner.merging.formulas.stability import NORMS_KEPT, grows
from learner.merging.merge_settings import MergeSettings

EVALUATIONS: Final = 20
_GRADIENT_CLIP_NORM: Final = 1.0


def simulate(cell: Cell, task: Task) -> Outcome:
    """Run a cell until its groups are consumed and its last changes are merged."""
    arm, seeds = cell.arm, len(cell.seeds)
    settings = arm.settings
    run = MergedRun(task.start(cell.seeds), task.shapes, settings, learners=arm.learners)
    steps = LocalSteps(cell, task, run)
    rounds = cell.plan.groups // (task.groups * arm.learners * settings.local_steps)
    evaluated = {math.ceil(rounds * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    scores = [task.score(run.version)]
    for number in range(rounds):
        for _ in range(settings.local_steps):
            steps.take(run.trained(number))
        run.finish_round(number)
        if number + 1 == rounds:
            run.flush()
        if number + 1 in evaluated:
            scores.append(task.score(run.version))
    norms = np.array(run.norms)  # [rounds, seeds]
    quarter = max(1, len(norms) // 4)
    growth = norms[-quarter:].mean(axis=0) / np.maximum(norms[:quarter].mean(axis=0), 1e-30)
    return Outcome(
        task=cell.task,
        name=arm.name,
        learners=arm.learners,
        settings=settings.model_dump(),
        learning_rate=cell.learning_rate,
        groups=cell.plan.groups,
        seeds=cell.seeds,
        rounds=rounds,
        scores=tuple(tuple(round(float(x), 4) for x in curve) for curve in torch.stack(scores, dim=1)),
        entries=task.shapes.size,
        sent_bytes=run.exchange.sent_bytes,
        norm_growth=round(float(np.median(growth)), 3),
        alarms=sum(_alarms(norms[:, seed]) for seed in range(seeds)),
    )


def _alarms(norms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bool:
    return any(grows(norms[max(0, end - NORMS_KEPT) : end].tolist()) for end in range(len(norms) + 1))


@dataclass(frozen=True, slots=True)
class _Sent:
    """Masters as they were handed in, of the fragment that was due."""

    fragment: int
    masters: Tensor
    """[learners, seeds, columns of the fragment]"""


class MergedRun:
    """The version, and the masters of every learner."""

    def __init__(self, start: Tensor, shapes: Shapes, settings: MergeSettings, *, learners: int) -> None:
        """Begin at ``start`` [seeds, parameters], which all learners have."""
        self.version = start.clone()
        self.local = start.expand(learners, -1, -1).clone()
        self.norms: list[list[float]] = []
        """Norms of the mean change, for each merge and seed."""
        self.exchange = Exchange(settings, shapes, learners=learners, seeds=len(start))
        self._settings = settings
        sizes = {name: math.prod(shape) for name, shape in shapes.named.items()}
        self._fragments = Fragments.of(sizes, count=settings.fragments)
        self.columns = [_columns(sizes, names) for names in self._fragments.names]
        self._momentum = torch.zeros_like(start)
        self._sent: _Sent | None = None

    def trained(self, number: int) -> int | None:
        """Return the fragment that alone is trained in a round. None: all of them."""
        return self._fragments.due(number) if self._settings.trains_a_fragment else None

    def finish_round(self, number: int) -> None:
        """Hand the changes of a round in, and merge them, or those of the round before if they overlap."""
        due = self._fragments.due(number)
        if self._settings.overlap == "wait":
            self._sent = self._handed_in(due)
            self.flush()
            return
        self.flush()
        self._sent = self._handed_in(due)
        if self._settings.overlap == "delayed":
            columns = self.columns[due]
            self.local[:, :, columns] = self.version[:, columns].expand_as(self._sent.masters)

    def flush(self) -> None:
        """Merge what was handed in, and let every learner go on from it."""
        if self._sent is None:
            return
        sent, columns = self._sent, self.columns[self._sent.fragment]
        anchor = self.version[:, columns]
        changes = self.exchange.carried(
            sent.masters.double() - anchor.double(), self._fragments.names[sent.fragment], self.version
        )
        mean = mean_change([(1 / len(changes), change) for change in changes])
        self.norms.append(torch.linalg.vector_norm(mean, dim=1).tolist())
        merged, momentum = anchor.clone(), self._momentum[:, columns]
        rate, beta = self._settings.outer_rate, self._settings.outer_momentum
        outer_step(merged, momentum, mean, rate=rate, beta=beta)
        self.version[:, columns], self._momentum[:, columns] = merged, momentum
        self.local[:, :, columns] = rebased(
            self.local[:, :, columns], sent.masters, anchor, merged, overlap=self._settings.overlap
        ).expand_as(sent.masters)
        self._sent = None

    def _handed_in(self, fragment: int) -> _Sent:
        return _Sent(fragment, self.local[:, :, self.columns[fragment]].clone())


class LocalSteps:
    """Adam steps of all learners side by side, on groups that the newest version has drawn."""

    def __init__(self, cell: Cell, task: Task, run: MergedRun) -> None:
        self._task, self._run, self._learners = task, run, cell.arm.learners
        self._method = Method.named("drift_aware")
        steps = cell.plan.groups // task.groups
        drawn = np.stack(
            [np.random.default_rng([seed, 1]).random((steps, task.groups)) for seed in cell.seeds], axis=1
        )
        self._prompts = torch.from_numpy((drawn * task.prompts).astype(np.int64))
        self._next = 0
        self._randomness = [torch.Generator().manual_seed(seed) for seed in cell.seeds]
        self._at_once = runs_at_once(
            self._method, groups=task.groups, group_size=task.group_size, tokens=task.tokens
        )
        parts = run.columns if run.trained(0) is not None else [torch.arange(run.version.shape[1])]
        self._columns = parts
        self._masters = [run.local.flatten(0, 1)[:, columns] for columns in parts]
        self._adams = [
            Adam(part, cell.learning_rate, gradient_clip_norm=_GRADIENT_CLIP_NORM) for part in self._masters
        ]

    def take(self, fragment: int | None) -> None:
        """Take one step at each learner, which moves one fragment, or everything."""
        task, run = self._task, self._run
        prompt = self._prompts[self._next : self._next + self._learners].flatten(0, 1)
        self._next += self._learners
        shape = (task.groups, task.group_size, task.tokens)
        uniform = torch.cat(  # learner after learner draws, so that a step has the same draws in every arm
            [
                torch.stack([torch.rand(shape, generator=each) for each in self._randomness])
                for _ in range(self._learners)
            ]
        )
        with torch.no_grad():
            behaviour = run.version.expand(self._learners, -1, -1).flatten(0, 1)
            completions = task.sample(behaviour, prompt, uniform)
        token = completions.token
        leaf = run.local.flatten(0, 1).detach().clone().requires_grad_()
        learner = _chosen(task.log_probability(leaf, prompt, token), token)
        rows = Rows(
            learner=learner.detach(),
            behaviour=_chosen(completions.log_probability, token),
            mask=completions.mask.flatten(1, 2),
            reward=completions.reward.flatten(1),
            staleness=torch.zeros(token.shape[0], task.groups * task.group_size, dtype=torch.int64),
            group_size=task.group_size,
        )
        seen = pull(self._method, rows, at_once=self._at_once)
        (gradient,) = torch.autograd.grad(learner, leaf, seen.gradient)
        part = fragment or 0
        columns, masters = self._columns[part], self._masters[part]
        masters.copy_(run.local.flatten(0, 1)[:, columns])
        self._adams[part].step(gradient[:, columns])
        run.local[:, :, columns] = masters.view(self._learners, -1, len(columns))


def _chosen(log_probability: Tensor, token: Tensor) -> Tensor:
    """Return the logprobs of what was written, [rows, n, t], from [rows, groups, G, t, vocabulary]."""
    return log_probability.gather(-1, token.unsqueeze(-1)).squeeze(-1).flatten(1, 2)


def _columns(sizes: dict[str, int], names: tuple[str, ...]) -> Tensor:
    """Return the columns of some tensors, in order."""
    first = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    return torch.cat([torch.arange(first[name], first[name] + sizes[name]) for name in names])
