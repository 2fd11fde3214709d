"""One cell: every seed of it trains at once on completions of policies from ``lag`` versions ago.

    version v:  prompts, lags -> behaviour = parameters of v - lag -> completions, rewards
                -> for each of the task's steps: learner logprobs of its share of the groups
                   -> objective -> one optimizer step
                -> version v + 1

A seed whose gradient is not finite takes no step, as the learner would; it is counted.
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
from bench.staleness_lab.drift import Drift
from bench.staleness_lab.measures import BINS, Measures
from bench.staleness_lab.methods import Method
from bench.staleness_lab.mismatch import given_reward, sampling_weights
from bench.staleness_lab.seeds import Rows, pull, runs_at_once
from bench.staleness_lab.tasks import Completions, Task

EVALUATIONS: Final = 25
_MEASURE_EVERY: Final = 10
"""Versions; more often in a run too short for a measure in every tenth of it."""
_GRADIENT_CLIP_NORM: Final = 1.0
_WINDOW: Final = 0.25
"""Share of all prompts that a run whose prompts shift draws from at any time."""


class PolicyHistory:
    """The parameters of the last ``depth`` versions of every seed."""

    def __init__(self, theta: Tensor, depth: int) -> None:
        self._kept = theta.new_empty(depth, *theta.shape)
        self._depth = depth

    def keep(self, version: int, theta: Tensor) -> None:
        """Overwrite the oldest version with a new one."""
        self._kept[version % self._depth] = theta

    def behind(self, version: int, lag: Tensor) -> Tensor:
        """Return [seeds, groups, parameters]: for each group the policy of ``lag`` [seeds, groups] before."""
        seed = torch.arange(lag.shape[0]).unsqueeze(1)
        return self._kept[(version - lag) % self._depth, seed]


def simulate(cell: Cell, task: Task, method: Method) -> Outcome:
    """Run a cell from its start policies to its last version."""
    started = time.process_time()
    theta = task.start(cell.seeds)
    adam = Adam(theta, cell.learning_rate, gradient_clip_norm=_GRADIENT_CLIP_NORM)
    history = PolicyHistory(theta, min(cell.staleness, cell.versions) + 1)
    prompts, lag_table = drawn_prompts(cell, task), _lags(cell, task)
    shape = (task.groups, task.group_size, task.tokens)
    randomness, noise = (
        [torch.Generator().manual_seed(first + seed) for seed in cell.seeds] for first in (0, 1 << 32)
    )
    groups = task.groups // task.steps
    at_once = runs_at_once(method, groups=groups, group_size=task.group_size, tokens=task.tokens)
    measures, drift = Measures(cell.versions), Drift(len(cell.seeds))
    evaluated_at = set(np.linspace(0, cell.versions, EVALUATIONS).round().astype(int).tolist())
    measured_every = max(1, min(_MEASURE_EVERY, cell.versions // BINS))
    scores, skipped = [], 0
    for version in range(cell.versions):
        if version in evaluated_at:
            scores.append(task.score(theta))
        history.keep(version, theta)
        prompt, lag = prompts[version], lag_table[version]
        uniform = torch.stack([torch.rand(shape, generator=each) for each in randomness])
        behaviour = sampling_weights(cell.mismatch, history.behind(version, lag), task.shapes)
        is_one = cell.mismatch != "samplers" and bool((lag == lag[:, :1]).all())
        completions = _sampled(task, behaviour, prompt, uniform, is_one=is_one)
        step = _Version(task, method, theta, adam, prompt, lag, completions, at_once)
        step.take(cell.mismatch, noise, drift)
        skipped += step.skipped
        if version % measured_every == 0:
            assert step.policy is not None
            assert step.weight is not None
            measures.add(version, completions=completions, policy=step.policy, weight=step.weight, lag=lag)
    scores.append(task.score(theta))
    return Outcome(
        cell=cell,
        scores=tuple(tuple(round(float(x), 4) for x in curve) for curve in torch.stack(scores, dim=1)),
        measures=measures.summary(),
        skipped=skipped / (cell.versions * task.steps * len(cell.seeds)),
        seconds=round(time.process_time() - started, 2),
    )


class _Version:
    """The steps of every seed on one version's completions."""

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
        self._lag = lag
        self._completions = completions
        self._at_once = at_once
        self.policy: Tensor | None = None
        """The learner's log-distributions before anything moved."""
        self.weight: Tensor | None = None
        """Measures of the first step."""
        self.skipped = 0
        """Seeds and steps whose gradient was not finite."""

    def take(self, mismatch: str, noise: list[torch.Generator], drift: Drift) -> None:
        """Move the parameters by one version, and let ``drift`` see what its completions show."""
        task, completions = self._task, self._completions
        recorded = completions.log_probability.gather(-1, completions.token.unsqueeze(-1)).squeeze(-1)
        recorded = recorded.flatten(1, 2)
        self._rows = Rows(
            learner=recorded,  # until a step knows it
            behaviour=recorded,
            mask=completions.mask.flatten(1, 2),
            reward=given_reward(mismatch, completions.reward.flatten(1), noise),
            staleness=self._lag.repeat_interleave(task.group_size, dim=1),
            group_size=task.group_size,
            expected_kl=self._by_token(drift.expected(self._lag)),
        )
        if task.steps > 1:
            with torch.no_grad():
                self.policy, proximal = self._learner(self._theta, slice(0, task.groups))
            self._rows = replace(self._rows, proximal=proximal)
        groups = task.groups // task.steps
        for first in range(0, task.groups, groups):
            self._descend(slice(first, first + groups))
        assert self._rows.proximal is not None
        drift.add(self._lag, self._rows.proximal - self._rows.behaviour, self._rows.mask)

    def _by_token(self, of_groups: Tensor | None) -> Tensor | None:
        """Return [seeds, n, t] from [seeds, groups]."""
        if of_groups is None:
            return None
        each = of_groups.repeat_interleave(self._task.group_size, dim=1).unsqueeze(-1)
        return each.expand(-1, -1, self._task.tokens)

    def _descend(self, groups: slice) -> None:
        """Take one optimizer step on some of the groups."""
        leaf = self._theta.detach().requires_grad_()
        policy, learner = self._learner(leaf, groups)
        size = self._task.group_size
        of_groups = self._rows.of(completions=slice(groups.start * size, groups.stop * size))
        seen = pull(self._method, replace(of_groups, learner=learner.detach()), at_once=self._at_once)
        if self.policy is None:
            self.policy = policy.detach()
            self._rows = replace(self._rows, proximal=learner.detach())
        if self.weight is None:
            self.weight = seen.weight
        (gradient,) = torch.autograd.grad(learner, leaf, seen.gradient)
        is_finite = gradient.isfinite().all(dim=1)
        self.skipped += int((~is_finite).sum())
        factor = is_finite.float()
        if self._method.scales_rate:
            factor = factor * seen.rate_factors()
        self._adam.step(torch.where(is_finite.unsqueeze(1), gradient, 0.0), factor)

    def _learner(self, theta: Tensor, groups: slice) -> tuple[Tensor, Tensor]:
        """Return the learner's log-distributions for some groups, and the logprobs of their tokens."""
        token = self._completions.token[:, groups]
        policy = self._task.log_probability(theta, self._prompt[:, groups], token)
        logprob = policy.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        return policy, logprob.flatten(1, 2)


def drawn_prompts(cell: Cell, task: Task) -> Tensor:
    """Return the prompts of each version, [versions, seeds, groups]: a matter of the seed alone."""
    drawn = np.stack(
        [np.random.default_rng([seed, 1]).random((cell.versions, task.groups)) for seed in cell.seeds], axis=1
    )
    if task.shifts:
        so_far = np.linspace(0, 1, cell.versions)[:, None, None]
        drawn = (1 - _WINDOW) * so_far + _WINDOW * drawn
    return torch.from_numpy((drawn * task.prompts).astype(np.int64))


def _lags(cell: Cell, task: Task) -> Tensor:
    of_run = lags(cell.delay, staleness=cell.staleness, versions=cell.versions, groups=task.groups)
    return torch.from_numpy(of_run).unsqueeze(1).expand(-1, len(cell.seeds), -1)


def _sampled(task: Task, behaviour: Tensor, prompt: Tensor, uniform: Tensor, *, is_one: bool) -> Completions:
    """Write the version's completions, [seeds, groups, ...]; ``is_one``: all groups of a seed share a
    model."""
    with torch.no_grad():
        if is_one:
            return task.sample(behaviour[:, 0], prompt, uniform)
        apart = task.sample(
            behaviour.flatten(0, 1), prompt.reshape(-1, 1), uniform.flatten(0, 1).unsqueeze(1)
        )
    return apart.unflatten(len(prompt))
