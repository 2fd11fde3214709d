"""What is measured of the weights while a cell runs: divergence, variances, effective sample size.

Every number is taken on the same completions for GSPO's weight, GEPO's and the method's own, so that
they can be compared at equal KL whatever the method made of its policy.
"""

import math
from collections import defaultdict
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.seeds import Pull, Rows, sample_sizes
from bench.staleness_lab.tasks import Completions
from learner.objective.importance import expectation_weight, log_group_expectation

BINS: Final = 10


class Measures:
    """Sums by name and tenth of the run."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._seen: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(BINS)])

    def add(self, version: int, completions: Completions, policy: Tensor, rows: Rows, pull: Pull) -> None:
        """Measure one step of all seeds.

        ``policy`` is the learner's log-distribution, shaped like ``completions.log_probability``.
        """
        batch = rows.batch()
        learner, behaviour = batch.learner_mean.detach(), batch.behaviour_mean
        importance = torch.exp(learner - behaviour)
        group = expectation_weight(learner, log_group_expectation(behaviour, batch.groups))
        values = {
            "kl": _kl(completions, policy),
            "lag": rows.staleness.float().mean(1),
            "ess": sample_sizes(pull.weight),
        }
        for name, weight in (("own", pull.weight), ("gspo", importance), ("gepo", group)):
            values[f"variance_{name}"], values[f"cv2_{name}"] = _spread(weight.view_as(completions.reward))
        place = version * BINS // self._versions
        for name, by_seed in values.items():
            self._seen[name][place] += by_seed.tolist()

    def summary(self) -> dict[str, tuple[float | None, ...]]:
        """Give the mean of every tenth by name; None where it is not finite."""
        return {name: tuple(_mean(values) for values in bins) for name, bins in self._seen.items()}


def _kl(completions: Completions, policy: Tensor) -> Tensor:
    """KL(behaviour || learner) at the positions written, exact over the vocabulary, mean a token, [seeds]."""
    behaviour, mask = completions.log_probability, completions.mask
    each = (behaviour.exp() * (behaviour - policy)).sum(-1)
    return (each * mask).sum(dim=(1, 2, 3)) / mask.sum(dim=(1, 2, 3))


def _spread(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Give [seeds] from [seeds, groups, G]: variance within a group, mean over the groups; and that
    over the square of the mean weight."""
    weight = weight.double()
    variance = weight.var(dim=2).mean(1)
    return variance, variance / weight.mean(dim=(1, 2)).square()


def _mean(values: list[float]) -> float | None:
    mean = sum(values) / len(values) if values else math.nan
    return float(f"{mean:.3g}") if math.isfinite(mean) else None
