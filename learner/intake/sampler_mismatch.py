"""Which samplers draw from another policy than the version they name, and are quarantined for it; pure.

Every group that a step consumed is evidence, whatever its staleness: ``divergence_panel`` subtracts the
policy's own drift. A sampler's engine should add next to nothing: bfloat16 against float32 is some 0.001 nats
of KL a token. A sampler that stays beyond the threshold has logprobs that mean something else: other sampling
parameters, kernels or quantisation, or a lie.

    unmeasured   no other sampler's groups compare with its own: never quarantined
    measured     its mismatch is known to MEASURED_NATS
    quarantined  beyond the threshold by SPREADS standard errors, on enough groups; while this learner runs
"""

from collections.abc import Sequence
from typing import Final

from learner.intake.divergence_panel import DivergencePanel, Estimate, Observed

LEAST_FRESH_GROUPS: Final = 4
LEAST_GROUPS: Final = 32
"""Nobody is quarantined on fewer groups, of age 0 or of any age: a fifth of the groups of an old version may
show twice the drift of the others."""

SPREADS: Final = 4.0
"""Standard errors by which a mismatch must exceed the threshold; it is tested after every step of a run. With
drift of 0.5 to 1.5 nats at age 32, uneven groups and 80 steps, 0 of 685 honest samplers did; the worst was at
3.3."""

MEASURED_NATS: Final = 0.1
"""Largest standard error of a mismatch that says anything: half of the default threshold."""


class SamplerMismatches:
    """The mismatch of each sampler, and which are quarantined."""

    def __init__(self, threshold_nats: float) -> None:
        """Quarantine beyond ``threshold_nats``; infinity: nobody."""
        self._threshold_nats = threshold_nats
        self.panel = DivergencePanel()
        """The evidence."""
        self._unmeasured: set[str] = set()
        self._quarantined: dict[str, Estimate] = {}

    def observe(self, groups: Sequence[Observed]) -> None:
        """Add a step's groups to the evidence."""
        self.panel.observe(groups)
        for name in {group.sampler_id for group in groups}:
            estimate = self.panel.mismatch(name)
            if estimate.error_nats > MEASURED_NATS:
                self._unmeasured.add(name)
            else:
                self._unmeasured.discard(name)
            if self._is_beyond(name, estimate):
                self._quarantined.setdefault(name, estimate)
        self._unmeasured.intersection_update(self.panel.samplers())

    @property
    def unmeasured_samplers(self) -> int:
        """How many samplers deliver groups that no other sampler's compare with."""
        return len(self._unmeasured)

    def quarantine(self, sampler_id: str) -> Estimate | None:
        """Return a quarantined sampler's mismatch when that began; None for the others."""
        return self._quarantined.get(sampler_id)

    def _is_beyond(self, sampler_id: str, estimate: Estimate) -> bool:
        # Groups fade by some hundredths from step to step: hence round.
        is_enough = (
            round(self.panel.fresh_groups(sampler_id)) >= LEAST_FRESH_GROUPS
            or round(self.panel.groups(sampler_id)) >= LEAST_GROUPS
        )
        return is_enough and estimate.nats - SPREADS * estimate.error_nats > self._threshold_nats
