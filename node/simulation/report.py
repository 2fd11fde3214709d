"""The outcome of a simulated run: how fast versions spread, how stale groups were, what was busiest."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from node.simulation.fleet import Fleet

SATURATED: Final = 0.9
"""Share of its time from which something is saturated: what waits for it is the rule rather than chance."""


@dataclass(frozen=True, slots=True)
class Report:
    versions: int
    version_s: float
    spread_s: tuple[float, ...]
    """Seconds from a step until 95 % of the samplers held its version, of each version that got so far."""
    staleness: dict[str, tuple[int, float, int]]
    """Kind of sampler -> groups trained on, their mean and largest staleness in versions."""
    waits: dict[str, int]
    """Bounds that cut requests for leases short, the most frequent first; empty: none did."""
    stale_groups: int
    expired_leases: int
    busy: dict[str, tuple[float, float]]
    """Possible bottleneck -> share of the time, bytes carried; the busiest first."""
    saturated: str
    """The busiest, if it is saturated."""

    @classmethod
    def of(cls, fleet: Fleet) -> Self:
        seconds, learner, hub = fleet.profile.seconds, fleet.learner, fleet.coordinator
        busy = {
            "learner's steps": (learner.busy_s, 0.0),
            "learner's uplink": (learner.upload_s, learner.uploaded_bytes),
            "coordinator's uplink": (hub.up.busy_s, hub.up.carried_bytes),
            "coordinator's downlink": (hub.down.busy_s, hub.down.carried_bytes),
            "coordinator's core": (fleet.desk.processor_s, 0.0),
            "samplers' places": (fleet.generated_s / sum(one.kind.places for one in fleet.samplers), 0.0),
        }
        for way in ("up", "down") if fleet.relays else ():
            link = max((getattr(one, way) for one in fleet.relays), key=lambda link: link.busy_s)
            busy[f"busiest relay's {way}link"] = (link.busy_s, link.carried_bytes)
        shares = {name: (busy_s / seconds, carried) for name, (busy_s, carried) in busy.items()}
        ordered = dict(sorted(shares.items(), key=lambda item: -item[1][0]))
        busiest = next(iter(ordered))
        return cls(
            learner.version,
            seconds / max(1, learner.version),
            tuple(fleet.spread_s.values()),
            {kind.name: _staleness(fleet, kind.name) for kind in fleet.profile.samplers},
            dict(fleet.desk.waits.most_common()),
            learner.stale,
            fleet.desk.expired,
            ordered,
            busiest if ordered[busiest][0] >= SATURATED else "",
        )

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        yield f"versions    {self.versions}, one each {self.version_s:.3g} s"
        reached = f"{len(self.spread_s)} of {self.versions} versions reached 95 % of the samplers"
        if self.spread_s:
            median_s, worst_s = statistics.median(self.spread_s), max(self.spread_s)
            reached += f", {median_s:.3g} s after the step in the median, {worst_s:.3g} s at worst"
        yield f"spread      {reached}"
        for name, (groups, mean, most) in self.staleness.items():
            yield f"staleness   {name}: {mean:.2f} versions in the mean, at most {most}, of {groups} groups"
        asked = sum(self.waits.values())
        said = ", ".join(f"{n / asked:.0%} {bound or 'granted whole'}" for bound, n in self.waits.items())
        yield f"leases      {said}"
        yield f"lost        {self.stale_groups} groups too stale, {self.expired_leases} leases expired"
        for name, (share, carried) in self.busy.items():
            yield f"busy        {share:4.0%}  {name:24}" + (f"{carried / 1e6:14,.1f} MB" if carried else "")
        yield f"saturated   {self.saturated or 'nothing'}"


def _staleness(fleet: Fleet, kind: str) -> tuple[int, float, int]:
    counts = {versions: n for (name, versions), n in fleet.learner.staleness.items() if name == kind}
    groups = sum(counts.values())
    mean = sum(versions * n for versions, n in counts.items()) / max(1, groups)
    return groups, mean, max(counts, default=0)
