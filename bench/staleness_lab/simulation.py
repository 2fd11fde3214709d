"""One cell: every seed of it trains at once on completions of policies from ``lag`` versions ago.

    version v:  prompts, lags -> behaviour = parameters of v - lag -> completions, rewards
                -> learner logprobs -> objective, a seed at a time -> one optimizer step -> version v + 1

A seed whose gradient is not finite takes no step at that version, as the learner would; it is counted.
"""

import time
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.batched import Adam
from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.delays import lags
from bench.staleness_lab.measures import Measures
from bench.staleness_lab.methods import SFPO_SHARE, Method
from bench.staleness_lab.seeds import Pull, Rows, pull, runs_at_once
from bench.staleness_lab.tasks import Completions, Task
from learner.objective.slow_fast import slow_fast_step

EVALUATIONS: Final = 25
_MEASURE_EVERY: Final = 10
_GRADIENT_CLIP_NORM: Final = 1.0


class PolicyHistory:
    """The parameters of the last ``depth`` versions of every seed."""

    def __init__(self, theta: Tensor, depth: int) -> None:
        self._kept = theta.new_empty(depth, *theta.shape)
        self._depth = depth

    def keep(self, version: int, theta: Tensor) -> None:
        """Overwrite the oldest version with a new one."""
        self._kept[version % self._depth] = theta

    def behind(self, version: int, lag: Tensor) -> Tensor:
        """Give [seeds, groups, parameters]: for each group the policy of ``lag`` [seeds, groups] before."""
        seed = torch.arange(lag.shape[0]).unsqueeze(1)
        return self._kept[(version - lag) % self._depth, seed]


def simulate(cell: Cell, task: Task, method: Method) -> Outcome:
    """Run a cell from its start policies to its last version."""
    started = time.process_time()
    theta = task.start(cell.seeds)
    adam = Adam(theta, cell.learning_rate, gradient_clip_norm=_GRADIENT_CLIP_NORM)
    history = PolicyHistory(theta, cell.staleness + 1)
    prompts, lag_table = _prompts(cell, task), _lags(cell, task)
    shape = (task.groups, task.group_size, task.tokens)
    randomness = [torch.Generator().manual_seed(seed) for seed in cell.seeds]
    at_once = runs_at_once(method, groups=task.groups, group_size=task.group_size, tokens=task.tokens)
    measures = Measures(cell.versions)
    evaluated_at = set(np.linspace(0, cell.versions, EVALUATIONS).round().astype(int).tolist())
    scores, skipped = [], 0
    for version in range(cell.versions):
        if version in evaluated_at:
            scores.append(task.score(theta))
        history.keep(version, theta)
        prompt, lag = prompts[version], lag_table[version]
        uniform = torch.stack([torch.rand(shape, generator=each) for each in randomness])
        completions = _sampled(task, history.behind(version, lag), prompt, uniform, lag)
        step = _Step(task, method, theta, adam, prompt, lag, completions, at_once)
        step.take()
        skipped += step.skipped
        if version % _MEASURE_EVERY == 0:
            measures.add(version, completions, *step.first)
    scores.append(task.score(theta))
    return Outcome(
        cell=cell,
        scores=tuple(tuple(round(float(x), 4) for x in curve) for curve in torch.stack(scores, dim=1)),
        measures=measures.summary(),
        skipped=skipped / (cell.versions * len(cell.seeds)),
        seconds=round(time.process_time() - started, 2),
    )


class _Step:
    """One version's step of every seed: plain, or SFPO's."""

    def __init__(
        self,
        task: Task,
        method: Method,
        theta: Tensor,
        adam: Adam,
        prompt: Tensor,
        lag: Tensor,
        completions: Completions,
        at_once: bool,
    ) -> None:
        self._task = task
        self._method = method
        self._theta = theta
        self._adam = adam
        self._prompt = prompt
        self._completions = completions
        self._at_once = at_once
        index = completions.token.unsqueeze(-1)
        self._rows = Rows(
            learner=torch.empty(0),
            behaviour=completions.log_probability.gather(-1, index).squeeze(-1).flatten(1, 2),
            mask=completions.mask.flatten(1, 2),
            reward=completions.reward.flatten(1),
            staleness=lag.repeat_interleave(task.group_size, dim=1),
            group_size=task.group_size,
        )
        self.first: tuple[Tensor, Rows, Pull]
        """Log-distributions, rows and pull before anything moved."""
        self.skipped = 0
        """Seeds whose gradient was not finite."""

    def take(self) -> None:
        """Move the parameters by one version."""
        if self._method.fast_steps == 0:
            self._descend()
            return
        slow_fast_step(
            [self._theta], self._descend, fast_steps=self._method.fast_steps, reposition_share=SFPO_SHARE
        )

    def _descend(self) -> None:
        leaf = self._theta.detach().requires_grad_()
        policy = self._task.log_probability(leaf, self._prompt, self._completions.token)
        learner = policy.gather(-1, self._completions.token.unsqueeze(-1)).squeeze(-1).flatten(1, 2)
        is_first = not hasattr(self, "first")
        self._rows = replace(
            self._rows, learner=learner.detach(), proximal=None if is_first else self.first[1].learner
        )
        seen = pull(self._method, self._rows, at_once=self._at_once)
        if is_first:
            self.first = (policy.detach(), self._rows, seen)
        (gradient,) = torch.autograd.grad(learner, leaf, seen.gradient)
        is_finite = gradient.isfinite().all(dim=1)
        if is_first:
            self.skipped = int((~is_finite).sum())
        factor = is_finite.float()
        if self._method.scales_rate:
            factor = factor * seen.rate_factors()
        self._adam.step(torch.where(is_finite.unsqueeze(1), gradient, 0.0), factor)


def _prompts(cell: Cell, task: Task) -> Tensor:
    """Which prompts each step trains on, [versions, seeds, groups]: a matter of the seed alone."""
    drawn = [
        np.random.default_rng([seed, 1]).integers(task.prompts, size=(cell.versions, task.groups))
        for seed in cell.seeds
    ]
    return torch.from_numpy(np.stack(drawn, axis=1))


def _lags(cell: Cell, task: Task) -> Tensor:
    drawn = [
        lags(cell.delay, staleness=cell.staleness, versions=cell.versions, groups=task.groups, seed=seed)
        for seed in cell.seeds
    ]
    return torch.from_numpy(np.stack(drawn, axis=1))


def _sampled(task: Task, behaviour: Tensor, prompt: Tensor, uniform: Tensor, lag: Tensor) -> Completions:
    """Write the step's completions, in the shape [seeds, groups, ...]; equal lags share one model."""
    with torch.no_grad():
        if bool((lag == lag[:, :1]).all()):
            return task.sample(behaviour[:, 0], prompt, uniform)
        apart = task.sample(
            behaviour.flatten(0, 1), prompt.reshape(-1, 1), uniform.flatten(0, 1).unsqueeze(1)
        )
    together = (len(prompt), -1)
    return Completions(
        token=torch.unflatten(apart.token.squeeze(1), 0, together),
        mask=torch.unflatten(apart.mask.squeeze(1), 0, together),
        reward=torch.unflatten(apart.reward.squeeze(1), 0, together),
        log_probability=torch.unflatten(apart.log_probability.squeeze(1), 0, together),
    )
