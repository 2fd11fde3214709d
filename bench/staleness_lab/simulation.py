"""One cell: every seed of it trains at once on completions of policies from ``lag`` versions ago.

    version v:  prompts, lags -> behaviour = parameters of v - lag -> completions, rewards
                -> learner logprobs -> objective -> one optimizer step -> version v + 1

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
from bench.staleness_lab.methods import Method
from bench.staleness_lab.mismatch import given_reward, sampling_weights
from bench.staleness_lab.seeds import Rows, pull, runs_at_once
from bench.staleness_lab.tasks import Completions, Task

EVALUATIONS: Final = 25
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
        """Return [seeds, groups, parameters]: for each group the policy of ``lag`` [seeds, groups] before."""
        seed = torch.arange(lag.shape[0]).unsqueeze(1)
        return self._kept[(version - lag) % self._depth, seed]


def simulate(cell: Cell, task: Task, method: Method) -> Outcome:
    """Run a cell from its start policies to its last version."""
    started = time.process_time()
    theta = task.start(cell.seeds)
    adam = Adam(theta, cell.learning_rate, gradient_clip_norm=_GRADIENT_CLIP_NORM)
    history = PolicyHistory(theta, min(cell.staleness, cell.versions) + 1)
    prompts, lag_table = _drawn_prompts(cell, task), _lags(cell, task)
    shape = (task.groups, task.group_size, task.tokens)
    randomness, noise = (
        [torch.Generator().manual_seed(first + seed) for seed in cell.seeds] for first in (0, 1 << 32)
    )
    at_once = runs_at_once(method, groups=task.groups, group_size=task.group_size, tokens=task.tokens)
    drift = Drift(len(cell.seeds))
    evaluated_at = set(np.linspace(0, cell.versions, EVALUATIONS).round().astype(int).tolist())
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
        rows = _rows(task, completions, lag, expected=drift.expected(lag))
        rows = replace(rows, reward=given_reward(cell.mismatch, rows.reward, noise))
        leaf = theta.detach().requires_grad_()
        policy = task.log_probability(leaf, prompt, completions.token)
        learner = _chosen(policy, completions.token)
        seen = pull(method, replace(rows, learner=learner.detach()), at_once=at_once)
        (gradient,) = torch.autograd.grad(learner, leaf, seen.gradient)
        is_finite = gradient.isfinite().all(dim=1)
        skipped += int((~is_finite).sum())
        factor = is_finite.float() * (seen.rate_factors() if method.scales_rate else 1)
        adam.step(torch.where(is_finite.unsqueeze(1), gradient, 0.0), factor)
        drift.add(lag, learner.detach() - rows.behaviour, rows.mask)
    scores.append(task.score(theta))
    return Outcome(
        cell=cell,
        scores=tuple(tuple(round(float(x), 4) for x in curve) for curve in torch.stack(scores, dim=1)),
        skipped=skipped / (cell.versions * len(cell.seeds)),
        seconds=round(time.process_time() - started, 2),
    )


def _rows(task: Task, completions: Completions, lag: Tensor, *, expected: Tensor | None) -> Rows:
    """Return what the objective sees of a version's completions, all but the learner's logprobs.

    Args:
        task: for the size of its groups.
        completions: of all groups.
        lag: [seeds, groups], versions.
        expected: [seeds, groups], nats a token that those ages make a learner expect, if it measured any.
    """
    recorded = _chosen(completions.log_probability, completions.token)
    each = None if expected is None else expected.repeat_interleave(task.group_size, dim=1).unsqueeze(-1)
    return Rows(
        learner=recorded,  # until the step knows it
        behaviour=recorded,
        mask=completions.mask.flatten(1, 2),
        reward=completions.reward.flatten(1),
        staleness=lag.repeat_interleave(task.group_size, dim=1),
        group_size=task.group_size,
        expected_kl=None if each is None else each.expand(-1, -1, task.tokens),
    )


def _chosen(log_probability: Tensor, token: Tensor) -> Tensor:
    """Return the logprobs of what was written, [seeds, n, t], from [seeds, groups, G, t, vocabulary]."""
    return log_probability.gather(-1, token.unsqueeze(-1)).squeeze(-1).flatten(1, 2)


def _drawn_prompts(cell: Cell, task: Task) -> Tensor:
    """Return the prompts of each version, [versions, seeds, groups]: a matter of the seed alone."""
    drawn = np.stack(
        [np.random.default_rng([seed, 1]).random((cell.versions, task.groups)) for seed in cell.seeds], axis=1
    )
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
