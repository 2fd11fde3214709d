"""How far each sampler's engine is from the learner's; pure.

Policies differ for two reasons: age and engine. In groups that were sampled from the very version
the learner holds only the second is left, and it should be next to nothing: bfloat16 against
float32 is some 0.001 nats of KL a token. What is beyond the threshold for good is a sampler whose
logprobs mean something else, by sampling parameters, kernels, quantisation or on purpose.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

WINDOW_GROUPS: Final = 16
"""Groups a sampler's mean goes back, about: newer ones count as 1/16."""

LEAST_GROUPS: Final = 4
"""Nobody is quarantined on the evidence of fewer."""

REMEMBERED_SAMPLERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What one fresh group says of its sampler."""

    sampler_id: str
    kl_nats: float
    """KL(behaviour || learner), mean over the tokens of a group of staleness 0."""


@dataclass(slots=True)
class _Record:
    mean_nats: float = 0.0
    groups: int = 0


@dataclass(slots=True)
class MismatchBook:
    """The mean mismatch of each sampler, and who is quarantined: for as long as this learner runs."""

    threshold_nats: float
    _records: dict[str, _Record] = field(default_factory=dict)

    def observe(self, mismatches: Iterable[Mismatch]) -> None:
        """Take note of a step's fresh groups."""
        for one in mismatches:
            record = self._records.pop(one.sampler_id, _Record())
            self._records[one.sampler_id] = record  # the last is the most recent
            record.groups += 1
            record.mean_nats += (one.kl_nats - record.mean_nats) / min(record.groups, WINDOW_GROUPS)
        for forgotten in list(self._records)[:-REMEMBERED_SAMPLERS]:
            del self._records[forgotten]

    def mean_nats(self, sampler_id: str) -> float:
        """Give the mean mismatch of a sampler; 0 for one that has shown nothing fresh."""
        record = self._records.get(sampler_id)
        return 0.0 if record is None else record.mean_nats

    def is_quarantined(self, sampler_id: str) -> bool:
        """Whether a sampler's groups are to be refused."""
        record = self._records.get(sampler_id)
        return record is not None and record.groups >= LEAST_GROUPS and record.mean_nats > self.threshold_nats
