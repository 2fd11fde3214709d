"""Whether samplers that were asked the same prompts of the same version agree; pure.

One sampler's word never decides a score. A prompt's value is the median of what samplers say. Of two that are
further apart than sampling explains, the lower one counts until a third is asked, so that nobody gains by a
lie. A sampler whose differences from the others all point one way is left out, where leaving it out explains
the disagreement; of two that are alone, nobody can say which.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final, TypeAlias

Said: TypeAlias = Mapping[int, Mapping[str, float]]
"""Prompt -> sampler -> what its group says."""

WIDE: Final = 16.0
"""Differences beyond so many lower quartiles of all are not sampling: 5 standard deviations of normal ones.
A liar moves the lower quartile only by lying in three quarters of the prompts, which is one-sided."""

FEW: Final = 4
"""Differences of which no quartile is worth anything."""

ONE_SIDED: Final = 4.0
"""Standard deviations of a fair coin's sum, sqrt(n), that signs of differences may be off: 17 of 17 or
41 of 52. By chance one sampler in 16 000 evaluations is."""

_SAME: Final = 1e-6
"""Relative difference that float32 makes."""


def widest_difference(said: Said, *, is_exact: bool) -> float:
    """Return how far two samplers may be apart on one prompt before the lower one counts.

    Args:
        is_exact: The likeliest token was taken each time, so that they differ by numerics only.
    """
    apart = sorted(_apart(*values.values()) for values in said.values() if len(values) == 2)
    apart = [difference for difference in apart if difference > 0]
    return 0.0 if is_exact or len(apart) < FEW else WIDE * apart[len(apart) // 4]


def is_contested(values: Iterable[float], *, widest: float) -> bool:
    """Whether two samplers are further apart than ``widest``, and a third has not been heard."""
    given = tuple(values)
    return len(given) == 2 and _apart(*given) > widest


def agreed(values: Iterable[float], *, widest: float) -> float:
    """Return what samplers say of a prompt together."""
    given = tuple(values)
    return min(given) if is_contested(given, widest=widest) else median(given)


def odd_ones_out(said: Said) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the samplers that are to be left out, and those that disagree without anyone to decide."""
    left_out: list[str] = []
    while suspects := _one_sided(said):
        explained = {one: len(_one_sided(_without(said, one))) for one in suspects}
        best = sorted(explained, key=lambda one: (explained[one], one))
        if len(best) > 1 and explained[best[0]] == explained[best[1]]:
            return tuple(sorted(left_out)), tuple(sorted(suspects))
        left_out.append(best[0])
        said = _without(said, best[0])
    return tuple(sorted(left_out)), ()


def _one_sided(said: Said) -> set[str]:
    """Return the samplers whose differences from the median of the others point one way."""
    signs: dict[str, list[int]] = {}
    for values in said.values():
        for sampler, value in values.items():
            others = [other for name, other in values.items() if name != sampler]
            if others and _apart(value, median(others)) > 0:
                signs.setdefault(sampler, []).append(1 if value > median(others) else -1)
    return {sampler for sampler, ones in signs.items() if abs(sum(ones)) > ONE_SIDED * len(ones) ** 0.5}


def _without(said: Said, sampler: str) -> Said:
    return {
        prompt: {name: value for name, value in values.items() if name != sampler}
        for prompt, values in said.items()
    }


def _apart(one: float, other: float) -> float:
    """Return the difference of two values; 0 where float32 would make it."""
    difference = abs(one - other)
    return difference if difference > _SAME * max(1.0, abs(one), abs(other)) else 0.0
