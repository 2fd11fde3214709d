"""What is measured of the weights while a cell runs: divergence, variances, effective sample size.

Every number is taken on the same completions for GSPO's weight, GEPO's and the method's own, so that
they can be compared at equal KL whatever the method made of its policy.
"""

import math
from collections import defaultdict
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.tasks import Completions
from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.divergence import effective_sample_size_ratio
from learner.objective.importance import expectation_weight, log_group_expectation

BINS: Final = 10


class Measures:
    """Sums by name and tenth of the run."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._seen: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(BINS)])

    def add(
        self,
        version: int,
        completions: Completions,
        policy: Tensor,
        batches: list[ObjectiveBatch],
        outcomes: list[ObjectiveOutcome],
    ) -> None:
        """Measure one step of all seeds.

        ``policy`` is the learner's log-distribution, shaped like ``completions.log_probability``.
        """
        place = version * BINS // self._versions
        kl = _kl(completions, policy)
        for seed, (batch, outcome) in enumerate(zip(batches, outcomes, strict=True)):
            own = _by_completion(outcome.weight, batch)
            importance = torch.exp(batch.learner_mean.detach() - batch.behaviour_mean)
            expectation = log_group_expectation(batch.behaviour_mean, batch.groups)
            group = expectation_weight(batch.learner_mean.detach(), expectation)
            values = {
                "kl": float(kl[seed]),
                "lag": float(batch.staleness_versions.float().mean()),
                "reward": float(batch.reward.mean()),
                "ess": _ess(own),
                "ess_importance": _ess(importance),
                "clipped": float(outcome.is_clipped.sum() / outcome.is_clipped.new_tensor(1).mul(
                    batch.mask.sum() if outcome.is_clipped.ndim == 2 else len(batch.mask))),
                "surprisal": -float(batch.token_mean(batch.learner_logprob).detach().mean()),
            }
            for name, weight in (("own", own), ("gspo", importance), ("gepo", group)):
                values[f"variance_{name}"], values[f"cv2_{name}"] = _spread(weight, batch)
            for name, value in values.items():
                self._seen[name][place].append(value)

    def summary(self) -> dict[str, tuple[float | None, ...]]:
        """Give the mean of every tenth by name; None where it is not finite."""
        return {name: tuple(_mean(values) for values in bins) for name, bins in self._seen.items()}


def _kl(completions: Completions, policy: Tensor) -> Tensor:
    """KL(behaviour || learner) at the positions written, exact over the vocabulary, mean a token, [seeds]."""
    behaviour = completions.log_probability
    each = (behaviour.exp() * (behaviour - policy)).sum(-1)
    mask = completions.mask
    return (each * mask).sum(dim=(1, 2, 3)) / mask.sum(dim=(1, 2, 3))


def _by_completion(weight: Tensor, batch: ObjectiveBatch) -> Tensor:
    return weight if weight.ndim == 1 else batch.token_mean(weight)


def _ess(weight: Tensor) -> float:
    """0 where nothing is left of the batch."""
    if not bool((weight > 0).any()) or not bool(weight.isfinite().all()):
        return 0.0
    return effective_sample_size_ratio(weight)


def _spread(weight: Tensor, batch: ObjectiveBatch) -> tuple[float, float]:
    """Variance within a group, mean over the groups; and that over the squared mean weight."""
    weight = weight.double()
    groups = batch.groups
    above = weight - groups.spread(groups.mean(weight))
    variance = float((groups.sum(above**2) / (groups.size(weight) - 1)).mean())
    mean = float(weight.mean())
    return variance, variance / mean**2 if mean > 0 else math.nan


def _mean(values: list[float]) -> float | None:
    mean = sum(values) / len(values) if values else math.nan
    return float(f"{mean:.4g}") if math.isfinite(mean) else None
