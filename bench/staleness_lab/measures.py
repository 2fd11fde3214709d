"""Measures of divergence and weights while a cell runs."""

import math
from collections import defaultdict
from typing import Final

from torch import Tensor

from bench.staleness_lab.seeds import sample_sizes
from bench.staleness_lab.tasks import Completions

BINS: Final = 10


class Measures:
    """Sums by name and tenth of the run."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._seen: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(BINS)])

    def add(
        self, version: int, *, completions: Completions, policy: Tensor, weight: Tensor, lag: Tensor
    ) -> None:
        """Measure one version of all seeds, as it was before it moved anything.

        Args:
            version: of the learner.
            completions: of all groups.
            policy: the learner's log-distribution, shaped like ``completions.log_probability``.
            weight: of the completions of the first step, [seeds, n].
            lag: of all groups, [seeds, groups].
        """
        values = {
            "kl": _kl(completions, policy),
            "lag": lag.float().mean(1),
            "ess": sample_sizes(weight),
        }
        place = version * BINS // self._versions
        for name, by_seed in values.items():
            self._seen[name][place] += by_seed.tolist()

    def summary(self) -> dict[str, tuple[float | None, ...]]:
        """Return the mean of every tenth by name; None where it is not finite."""
        return {name: tuple(_mean(values) for values in bins) for name, bins in self._seen.items()}


def _kl(completions: Completions, policy: Tensor) -> Tensor:
    """KL(behaviour || learner) at the positions written, exact over the vocabulary, mean a token, [seeds]."""
    behaviour, mask = completions.log_probability, completions.mask
    each = (behaviour.exp() * (behaviour - policy)).sum(-1)
    return (each * mask).sum(dim=(1, 2, 3)) / mask.sum(dim=(1, 2, 3))


def _mean(values: list[float]) -> float | None:
    mean = sum(values) / len(values) if values else math.nan
    return float(f"{mean:.3g}") if math.isfinite(mean) else None
