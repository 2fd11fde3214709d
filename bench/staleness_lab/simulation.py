"""One cell: every seed of it trains at once on completions of policies from ``lag`` versions ago.

    version v:  prompts, lags -> behaviour = parameters of v - lag -> completions, rewards
                -> learner logprobs -> objective, a seed at a time -> one optimizer step -> version v + 1

The objective is called for each seed alone: what it divides by or whitens over is that run's batch.
"""

import time
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.batched import Adam
from bench.staleness_lab.cells import Cell, Outcome
from bench.staleness_lab.delays import lags
from bench.staleness_lab.measures import Measures
from bench.staleness_lab.methods import Method
from bench.staleness_lab.tasks import Completions, Task
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome

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
    randomness = [torch.Generator().manual_seed(seed) for seed in cell.seeds]
    measures = Measures(cell.versions)
    evaluated_at = set(np.linspace(0, cell.versions, EVALUATIONS).round().astype(int).tolist())
    scores, skipped = [], 0
    for version in range(cell.versions):
        if version in evaluated_at:
            scores.append(task.score(theta))
        history.keep(version, theta)
        prompt, lag = prompts[version], lag_table[version]
        uniform = torch.stack([torch.rand(_uniform_shape(task), generator=each) for each in randomness])
        completions = _sampled(task, history.behind(version, lag), prompt, uniform, lag)
        gradient, factor, observed = _gradient(task, method, theta, prompt, lag, completions)
        if version % _MEASURE_EVERY == 0:
            measures.add(version, completions, *observed)
        is_finite = gradient.isfinite().all(dim=1)
        skipped += int((~is_finite).sum())
        adam.step(torch.where(is_finite.unsqueeze(1), gradient, 0.0), torch.where(is_finite, factor, 0.0))
    scores.append(task.score(theta))
    return Outcome(
        cell=cell,
        scores=tuple(tuple(round(float(x), 4) for x in curve) for curve in torch.stack(scores, dim=1)),
        measures=measures.summary(),
        skipped=skipped / (cell.versions * len(cell.seeds)),
        seconds=round(time.process_time() - started, 2),
    )


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


def _uniform_shape(task: Task) -> tuple[int, int, int]:
    return task.groups, task.group_size, task.tokens


def _sampled(task: Task, behaviour: Tensor, prompt: Tensor, uniform: Tensor, lag: Tensor) -> Completions:
    """Write the step's completions, in the shape [seeds, groups, ...]; equal lags share one model."""
    with torch.no_grad():
        if bool((lag == lag[:, :1]).all()):
            return task.sample(behaviour[:, 0], prompt, uniform)
        apart = task.sample(behaviour.flatten(0, 1), prompt.reshape(-1, 1), uniform.flatten(0, 1).unsqueeze(1))
    together = (len(prompt), -1)
    return Completions(
        token=apart.token.squeeze(1).unflatten(0, together),
        mask=apart.mask.squeeze(1).unflatten(0, together),
        reward=apart.reward.squeeze(1).unflatten(0, together),
        log_probability=apart.log_probability.squeeze(1).unflatten(0, together),
    )


def _gradient(
    task: Task, method: Method, theta: Tensor, prompt: Tensor, lag: Tensor, completions: Completions
) -> tuple[Tensor, Tensor, tuple[Tensor, list[ObjectiveBatch], list[ObjectiveOutcome]]]:
    """Give d loss / d theta [seeds, parameters], learning-rate factors [seeds], and what was seen."""
    leaf = theta.detach().requires_grad_()
    policy = task.log_probability(leaf, prompt, completions.token)
    index = completions.token.unsqueeze(-1)
    learner = policy.gather(-1, index).squeeze(-1)
    behaviour = completions.log_probability.gather(-1, index).squeeze(-1)
    group_index = torch.arange(task.groups).repeat_interleave(task.group_size)
    batches, outcomes, gradients, factors = [], [], [], []
    for seed in range(len(theta)):
        logprob = learner[seed].detach().flatten(0, 1).requires_grad_()
        batch = method.batch(
            learner_logprob=logprob,
            behaviour_logprob=behaviour[seed].flatten(0, 1),
            mask=completions.mask[seed].flatten(0, 1),
            group_index=group_index,
            reward=completions.reward[seed].flatten(),
            staleness_versions=lag[seed].repeat_interleave(task.group_size),
            max_tokens=task.tokens,
        )
        outcome = method.objective(batch)
        (gradient,) = torch.autograd.grad(outcome.loss, logprob)
        batches.append(batch)
        outcomes.append(outcome)
        gradients.append(gradient.view_as(learner[seed]))
        factors.append(method.rate_factor(outcome))
    (gradient,) = torch.autograd.grad(learner, leaf, torch.stack(gradients))
    return gradient, torch.tensor(factors), (policy.detach(), batches, outcomes)
