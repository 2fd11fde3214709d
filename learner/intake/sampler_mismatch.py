"""Which samplers draw from another policy than the version they name, and are quarantined for it; pure.

Every group that a step consumed is evidence, whatever its staleness: ``divergence_panel`` subtracts the
policy's own drift. A sampler's engine should add next to nothing: bfloat16 against float32 is some 0.001 nats
of KL a token. A sampler that stays beyond the threshold has logprobs that mean something else: other sampling
parameters, kernels or quantisation, or a lie.

What the panel finds is by comparison, and rests on the ages that samplers name. So a learner that has the
words of earlier versions quarantines nobody for it: it scores drawn groups by the versions that they name
(``named_versions``), and what they show decides.

    unmeasured   no other sampler's groups compare with its own: not suspected by the panel
    measured     its mismatch is known to MEASURED_NATS
    suspected    beyond SUSPECT_NATS by SPREADS standard errors, too far from the learner or too near to it;
                 its groups are scored again
    beyond       the same of the threshold, on enough groups, or by GROSS_SPREADS on a few; too far only.
                 Quarantined where the learner has no words to ask; where contributors measure, if two of them
                 find it, each by its own groups alone, so that no one shuts an honest sampler out
    quarantined  its groups are refused, but for a probe now and then, which is trained on so that it can be
                 measured
    released     the mean of its last probes is within the threshold

Who is quarantined is in the coordinator's ledger, which survives this process: see ``outstanding_rollouts``.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from learner.intake.divergence_panel import HALF_LIFE_STEPS, DivergencePanel, Estimate, Observed
from learner.intake.named_versions import NamedVersions, Scored
from node.values.limits import PROBE_S

LEAST_FRESH_GROUPS: Final = 4
LEAST_GROUPS: Final = 32
"""Nobody is quarantined on fewer groups, of age 0 or of any age: a fifth of the groups of an old version may
show twice the drift of the others."""

SPREADS: Final = 3.0
"""Standard errors by which a mismatch must exceed the threshold; it is tested after every step of a run. With
drift of 0.5 to 1 nats at age 32, uneven groups, mismatches up to 0.01 and 60 to 80 steps, 0 of 660 honest
samplers did at the default threshold, and 1 of 180 at 2.5."""

GROSS_SPREADS: Final = 8.0
GROSS_GROUPS: Final = 8
"""Tokens that no policy drew are beyond any drift. With these, too, 0 of 320 honest samplers were."""

SUSPECT_NATS: Final = 0.01
"""Mismatch from which the panel suspects a sampler, where the threshold is not lower: a suspicion costs some
groups scored once more, and no one is shut out for it."""

MEASURED_NATS: Final = 0.1
"""Largest standard error of a mismatch that says anything."""

LEAST_PROBES: Final = 4
MOST_PROBES: Final = 8
"""Probes that a release looks at. They are minutes apart, so that the panel has forgotten one when the next
comes."""


@dataclass(frozen=True, slots=True)
class Found:
    """Samplers to act on after a step, and groups to look at."""

    beyond: dict[str, Estimate] = field(default_factory=dict)
    """Quarantine these; with their mismatch."""
    content: tuple[str, ...] = ()
    """Release these."""
    to_score: tuple[tuple[int, ...], ...] = ()
    """Places of the step's groups to score by the versions that they name, those of one sampler together.
    Tell ``scored`` of each that was."""


class SamplerMismatches:
    """The mismatch of each sampler, and which are to be quarantined or released."""

    def __init__(self, threshold_nats: float, *, named: NamedVersions | None = None) -> None:
        """Quarantine beyond ``threshold_nats``; infinity: nobody.

        Args:
            named: Where groups can be scored by the versions that they name: what these show. None: the panel
                decides alone.
        """
        self._threshold_nats = threshold_nats
        self.panel = DivergencePanel()
        """The evidence."""
        self._by_contributor: dict[str, DivergencePanel] = {}
        """The evidence of each that was heard of within a half-life."""
        self._heard: dict[str, int] = {}
        self._steps = 0
        self._named = named if threshold_nats < math.inf else None
        self._unmeasured: set[str] = set()
        self._probes: dict[str, deque[float]] = {}
        """Nats beyond the drift, or from the version named, of samplers that were in quarantine of late."""
        self._probed_at_s: dict[str, float] = {}
        self._taken = Counter[str]()
        """Probes that were taken and not seen in a step yet; other groups were on their way before."""

    def takes_probe(self, sampler_id: str, *, now: float) -> bool:
        """Decide whether a group of a quarantined sampler is taken to measure it.

        Groups that were on their way are not: the first probe is due after half a period.
        """
        due_s = self._probed_at_s.setdefault(sampler_id, now) + PROBE_S / 2
        if now < due_s:
            return False
        self._probed_at_s[sampler_id] = now
        self._taken[sampler_id] += 1
        return True

    def observe(
        self, groups: Sequence[Observed], *, quarantined: Collection[str] = (), now: float = 0.0
    ) -> Found:
        """Add a step's groups to the evidence; groups of ``quarantined`` samplers do not count for drift.

        ``now`` are monotonic seconds, of which scoring takes a bounded share.
        """
        fleet = [group for group in groups if group.sampler_id not in quarantined]
        probes = []
        for place, group in enumerate(groups):
            if group.sampler_id in quarantined and self._taken[group.sampler_id]:
                self._taken[group.sampler_id] -= 1
                probes.append(place)
                if self._named is None:
                    self._add_probe(group.sampler_id, self._beyond_drift(group))
        self.panel.observe(fleet)
        if self._threshold_nats < math.inf:
            self._hear_contributors(fleet)
        beyond, suspected = {}, set()
        for name in {group.sampler_id for group in fleet}:
            estimate = self.panel.mismatch(name)
            if estimate.error_nats > MEASURED_NATS:
                self._unmeasured.add(name)
            else:
                self._unmeasured.discard(name)
            if self._is_suspect(estimate):
                suspected.add(name)
            is_asked = self._named is not None and not self._named.is_out_of_reach(name)
            if not is_asked and self._are_agreed(name):
                beyond[name] = estimate
        self._unmeasured.intersection_update(self.panel.samplers())
        for name in beyond:
            self._shut_out(name)
        to_score = list[tuple[int, ...]]()
        if self._named is not None:
            places = [place for place, one in enumerate(groups) if one.sampler_id not in quarantined]
            samplers = [groups[place].sampler_id for place in places]
            drawn = self._named.drawn(samplers, suspected=frozenset(suspected), now=now)
            to_score = [(place,) for place in probes]
            if drawn:
                to_score.append(tuple(places[one] for one in drawn))
        content = self._content()
        # Of those released, here or by an operator: in another quarantine groups are on their way again.
        for name in self._probed_at_s.keys() - (set(quarantined) - set(content)):
            del self._probed_at_s[name]
        return Found(beyond, content, tuple(to_score))

    def took(self, seconds: float, *, now: float) -> None:
        """Note how long the drawn groups took to score."""
        if self._named is not None:
            self._named.took(seconds, now=now)

    def scored(self, group: Observed, scored: Scored | None, *, is_probe: bool) -> str | None:
        """Note what a group shows by the version that it names; None: its words are gone.

        Returns why its sampler is to be quarantined, "" to release it, None to leave it as it is.
        """
        name = group.sampler_id
        if self._named is None:
            return None
        if is_probe:
            nats = self._beyond_drift(group) if scored is None else scored.nats
            self._add_probe(name, math.inf if scored is not None and scored.is_misnamed else nats)
            return "" if name in self._content() else None
        self._named.note(name, scored)
        why = "" if scored is None else self._named.verdict(name, scored)
        if not why:
            return None
        self._shut_out(name)
        return why

    @property
    def unmeasured_samplers(self) -> int:
        """Number of samplers whose groups no other sampler's compare with."""
        return len(self._unmeasured)

    def _add_probe(self, name: str, nats: float) -> None:
        self._probes.setdefault(name, deque(maxlen=MOST_PROBES)).append(nats)

    def _beyond_drift(self, group: Observed) -> float:
        """Return how far a group is from what its age explains: too near is as odd as too far."""
        return abs(group.kl_nats - sum(share * self.panel.drift(age).nats for age, share in group.ages))

    def _content(self) -> tuple[str, ...]:
        """Return the samplers whose probes fit, and forget what they were before."""
        content = tuple(name for name, probes in self._probes.items() if self._are_within(probes))
        for name in content:
            del self._probes[name]
            self.panel.forget(name)
        return content

    def _shut_out(self, name: str) -> None:
        """Forget what a sampler's groups showed: they say nothing of what age costs."""
        for panel in (self.panel, *self._by_contributor.values()):
            panel.forget(name)
        if self._named is not None:
            self._named.forget(name)

    def _are_within(self, probes: Collection[float]) -> bool:
        return len(probes) >= LEAST_PROBES and sum(probes) / len(probes) <= self._threshold_nats

    def _is_suspect(self, estimate: Estimate) -> bool:
        least_nats = min(SUSPECT_NATS, self._threshold_nats)
        return abs(estimate.nats) - SPREADS * estimate.error_nats > least_nats

    def _hear_contributors(self, groups: Sequence[Observed]) -> None:
        self._steps += 1
        for name in sorted({group.said_by for group in groups if group.said_by}):
            panel = self._by_contributor.setdefault(name, DivergencePanel())
            panel.observe([group for group in groups if group.said_by == name])
            self._heard[name] = self._steps
        for name in [one for one, step in self._heard.items() if self._steps - step > HALF_LIFE_STEPS]:
            del self._heard[name], self._by_contributor[name]

    def _are_agreed(self, sampler_id: str) -> bool:
        """Whether those who must say that a sampler is beyond do: two, or the only one there is."""
        panels = tuple(self._by_contributor.values()) or (self.panel,)
        return sum(self._is_beyond(sampler_id, panel) for panel in panels) >= min(2, len(panels))

    def _is_beyond(self, sampler_id: str, panel: DivergencePanel) -> bool:
        estimate = panel.mismatch(sampler_id)
        # Groups fade by some hundredths from step to step: hence round.
        groups = round(panel.groups(sampler_id))
        is_enough = round(panel.fresh_groups(sampler_id)) >= LEAST_FRESH_GROUPS or groups >= LEAST_GROUPS
        if not is_enough and groups < GROSS_GROUPS:
            return False
        spreads = SPREADS if is_enough else GROSS_SPREADS
        return estimate.nats - spreads * estimate.error_nats > self._threshold_nats
