"""Whether samplers draw from the versions that they name, by groups that are scored once more; pure.

The divergence panel compares samplers by what they say of themselves: one that names older versions than it
draws from makes old groups look cheap, and others look dishonest. The learner has the words of the versions
it published lately. It draws groups, of samplers that the panel suspects (of too much or too little
divergence) and now and then of any, and scores their tokens by the words of the version that they name; where
those do not fit, by the words of versions around it, too.

    suspected --drawn, scored--> fits ------------------- CLEARED_GROUPS of them: not suspected for a while
                                 fits another version --- MISNAMED_GROUPS of them: quarantined
                                 fits none -------------- their mean is beyond the threshold: quarantined
                                 its words are gone ----- OUT_OF_REACH_GROUPS in a row: the panel decides
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEAST_NATS: Final = 2e-4
"""Divergence from the version named up to which a group fits, whatever else it fits."""

MISNAMED_RATIO: Final = 4.0
LEAST_TOKENS: Final = 16
SURE_RATIO: Final = 1000.0
LEAST_SURE_TOKENS: Final = 6
TRIMMED_SHARE: Final = 1 / 8
"""Another version fits better where its divergence is so much smaller, over so many tokens, also without the
share of tokens that say so most. The noise of an engine (bfloat16 against float32: some 0.001 nats a token)
is in both divergences: it hides a wrong name, and makes one of a right name only where a token or two are
most of it."""

MISNAMED_GROUPS: Final = 3
REMEMBERED_GROUPS: Final = 512
"""Groups of one sampler whose names are remembered. Where the policy hardly moves, a wrong name shows in few
groups: of a sampler that named versions 8 older in one group of three, 3 in 400 versions of the demo."""

LEAST_OFF_GROUPS: Final = 4
OFF_GROUPS: Final = 16
"""Newest groups whose divergence is averaged, and how many it takes."""

SPREADS: Final = 3.0

CLEARED_GROUPS: Final = 16
CLEARED_STEPS: Final = 64
"""A sampler is not suspected for so many steps once so many of its groups in a row fitted; one that has named
another version is followed until that is forgotten."""

OUT_OF_REACH_GROUPS: Final = 8

REMEMBERED_SAMPLERS: Final = 1024

SPOT_STEPS: Final = 4
"""One group in the batches of so many steps is drawn from all where nobody is suspected."""

LARGEST_SHARE: Final = 0.05
FOLLOWING_SHARE: Final = 0.2
"""Share of the learner's time that may go into scoring, beyond probes of quarantined samplers; and while a
sampler is there that has named another version."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The divergence of a group's tokens from the version that they name, nats a token."""

    group_id: str
    version: int
    """The version that they name."""
    nats: float
    other_version: int | None = None
    """The version around it that fits them best; None: not looked for."""
    other_nats: float = math.inf
    is_misnamed: bool = False
    """Whether that one drew them, as ``fits_better`` says."""


def fits_better(named: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Decide whether another version than the one named drew a group's tokens.

    Args:
        named: [tokens], >= 0, estimates of KL(what drew them || the version named), one a token.
        other: [tokens], the same of the other version.
    """
    if len(named) < LEAST_SURE_TOKENS or named.mean() <= LEAST_NATS:
        return False
    ratio = MISNAMED_RATIO if len(named) >= LEAST_TOKENS else SURE_RATIO
    least_telling = np.argsort(named - other)[: len(named) - math.ceil(TRIMMED_SHARE * len(named))]
    sums = [(named.sum(), other.sum()), (named[least_telling].sum(), other[least_telling].sum())]
    return all(by_name > ratio * by_other for by_name, by_other in sums)


@dataclass(slots=True)
class _Record:
    misnamed: deque[bool] = field(default_factory=lambda: deque(maxlen=REMEMBERED_GROUPS))
    nats: deque[float] = field(default_factory=lambda: deque(maxlen=OFF_GROUPS))
    cleared_until: int = 0
    """The step until which it is not suspected."""
    fitting: int = 0
    """Groups in a row that fitted, since it was cleared."""
    out_of_reach: int = 0
    """Groups in a row whose words the learner no longer had."""


class NamedVersions:
    """The groups of each sampler that were scored by the version they name."""

    def __init__(self, threshold_nats: float, *, random: Callable[[], float]) -> None:
        """Find samplers whose groups are further than ``threshold_nats`` from the versions they name."""
        self._threshold_nats = threshold_nats
        self._random = random
        self._records: dict[str, _Record] = {}
        self._step = 0
        self._scored_at_s, self._took_s = -math.inf, 0.0

    def drawn(self, samplers: Sequence[str], *, suspected: frozenset[str], now: float) -> tuple[int, ...]:
        """Draw a sampler whose groups are scored after a step; return their places, in a random order.

        Words are read once for all groups that name a version; a step of which nothing is drawn has none.

        Args:
            samplers: of the step's groups, in their order.
            suspected: by the panel.
        """
        self._step += 1
        followed = {name for name in samplers if self._is_followed(name)}
        share = FOLLOWING_SHARE if followed else LARGEST_SHARE
        if not samplers or now < self._scored_at_s + self._took_s * (1 / share - 1):
            return ()
        asked = followed or {name for name in samplers if name in suspected and not self._is_cleared(name)}
        if not asked and self._random() >= 1 / SPOT_STEPS:
            return ()
        names = sorted(asked or set(samplers))
        name = names[int(self._random() * len(names))]
        places = [place for place, one in enumerate(samplers) if one == name]
        first = int(self._random() * len(places))
        return (*places[first:], *places[:first])

    def took(self, seconds: float, *, now: float) -> None:
        """Note how long a scoring took: the next one waits until all were a small share of the time."""
        self._scored_at_s, self._took_s = now, seconds

    def note(self, sampler_id: str, scored: Scored | None) -> None:
        """Note what scoring a group showed; None: the words of its version are gone."""
        record = self._records.pop(sampler_id, None) or _Record()
        self._records[sampler_id] = record  # the last is the most recent
        for forgotten in list(self._records)[:-REMEMBERED_SAMPLERS]:
            del self._records[forgotten]
        if scored is None:
            record.out_of_reach += 1
            return
        record.out_of_reach = 0
        record.misnamed.append(scored.is_misnamed)
        record.nats.append(scored.nats)
        fits = not scored.is_misnamed and scored.nats <= self._threshold_nats
        record.fitting = record.fitting + 1 if fits else 0
        if record.fitting >= CLEARED_GROUPS:
            record.fitting, record.cleared_until = 0, self._step + CLEARED_STEPS

    def verdict(self, sampler_id: str, scored: Scored) -> str:
        """Return why a sampler is to be quarantined, after a group of it was scored; empty: it is not."""
        record = self._records[sampler_id]
        misnamed = sum(record.misnamed)
        if scored.is_misnamed and misnamed >= MISNAMED_GROUPS:
            return (
                f"{misnamed} of {len(record.misnamed)} of its groups that were scored again were drawn by "
                f"other versions than they name: {scored.group_id} names {scored.version}, from which it is "
                f"{scored.nats:.3g} nats a token, and {scored.other_nats:.2g} from {scored.other_version}"
            )
        groups = len(record.nats)
        if groups < LEAST_OFF_GROUPS:
            return ""
        mean = sum(record.nats) / groups
        error = math.sqrt(sum((nats - mean) ** 2 for nats in record.nats) / (groups - 1) / groups)
        if mean - SPREADS * error <= self._threshold_nats:
            return ""
        return (
            f"its groups are {mean:.3g} +- {error:.2g} nats a token from the versions they name, scored "
            f"again with the words of these (bound {self._threshold_nats:g}): its logprobs are not those "
            "of the versions it names"
        )

    def is_out_of_reach(self, sampler_id: str) -> bool:
        """Whether a sampler names versions that the learner has no words of any more."""
        record = self._records.get(sampler_id)
        return record is not None and record.out_of_reach >= OUT_OF_REACH_GROUPS

    def forget(self, sampler_id: str) -> None:
        """Forget a sampler's groups."""
        self._records.pop(sampler_id, None)

    def _is_followed(self, sampler_id: str) -> bool:
        """Whether a group of a sampler did not fit the version that it named."""
        record = self._records.get(sampler_id)
        return record is not None and (
            any(record.misnamed) or any(nats > self._threshold_nats for nats in record.nats)
        )

    def _is_cleared(self, sampler_id: str) -> bool:
        record = self._records.get(sampler_id)
        return record is not None and self._step <= record.cleared_until
