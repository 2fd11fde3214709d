"""Which samplers draw from another policy than the version they name, and are not believed any more; pure.

Every group that a step consumed is evidence, whatever its staleness: ``learner.divergence_panel`` takes the
policy's own drift off. A sampler's engine should add next to nothing: bfloat16 against float32 is some 0.001
nats of KL a token. What is beyond the threshold for good is a sampler whose logprobs mean something else,
by sampling parameters, kernels, quantisation or on purpose.

    unmeasured   its groups can be compared with nobody's: never quarantined
    measured     its mismatch is known to MEASURED_NATS
    quarantined  beyond the threshold by SPREADS standard errors, on enough groups; while this learner runs
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learner.divergence_panel import DivergencePanel, Estimate, Observed

LEAST_FRESH_GROUPS: Final = 4
LEAST_GROUPS: Final = 32
"""Nobody is quarantined on the evidence of fewer, of age 0 or of any: a fifth of the groups of an old version
may show twice the drift of the others."""

SPREADS: Final = 4.0
"""Standard errors between threshold and mismatch, which is looked at after every step of a run. With drift of
0.5 to 1.5 nats at age 32, uneven groups and 80 steps 0 of 685 honest samplers were; the worst was at 3.3."""

MEASURED_NATS: Final = 0.1
"""Largest standard error of a mismatch that says anything: half of the default threshold."""


class MismatchBook:
    """The mismatch of each sampler, and who is quarantined."""

    def __init__(self, threshold_nats: float) -> None:
        """Quarantine beyond ``threshold_nats``; infinity: nobody."""
        self._threshold_nats = threshold_nats
        self._panel = DivergencePanel()
        self._unmeasured: set[str] = set()
        self._quarantined: dict[str, Estimate] = {}

    def observe(self, groups: Sequence[Observed]) -> None:
        """Take note of a step's groups."""
        self._panel.observe(groups)
        for name in {group.sampler_id for group in groups}:
            estimate = self.mismatch(name)
            if estimate.error_nats > MEASURED_NATS:
                self._unmeasured.add(name)
            else:
                self._unmeasured.discard(name)
            if self._is_beyond(name, estimate):
                self._quarantined.setdefault(name, estimate)
        self._unmeasured.intersection_update(self._panel.samplers())

    @property
    def unmeasured_samplers(self) -> int:
        """How many samplers deliver groups that can be compared with nobody's."""
        return len(self._unmeasured)

    def mismatch(self, sampler_id: str) -> Estimate:
        """Return what a sampler's engine adds to the divergence of its groups."""
        return self._panel.mismatch(sampler_id)

    def expected_divergence(self, sampler_id: str, ages_versions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the KL that tokens of some ages are expected to show, see ``DivergencePanel.expected``."""
        return self._panel.expected(sampler_id, ages_versions)

    def drift(self, age_versions: int) -> Estimate:
        """Return what the policy's age alone makes of the divergence."""
        return self._panel.drift(age_versions)

    def measured_groups(self, sampler_id: str) -> float:
        """Return how many groups that rests on, older ones as fractions."""
        return self._panel.groups(sampler_id)

    def quarantine(self, sampler_id: str) -> Estimate | None:
        """Return why a sampler's groups are refused: its mismatch when that began; None: they are not."""
        return self._quarantined.get(sampler_id)

    def _is_beyond(self, sampler_id: str, estimate: Estimate) -> bool:
        # Of the last few some hundredths are forgotten already: hence round.
        is_enough = (
            round(self._panel.fresh_groups(sampler_id)) >= LEAST_FRESH_GROUPS
            or round(self._panel.groups(sampler_id)) >= LEAST_GROUPS
        )
        return is_enough and estimate.nats - SPREADS * estimate.error_nats > self._threshold_nats
