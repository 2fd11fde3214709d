"""How many groups of each sampler met which verdict, and how stale those were that were trained on; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from node.values.fact import Fact
from node.values.groups.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Tally(Fact):
    """The groups of one sampler."""

    kind: ClassVar[str] = "tally"

    sampler_id: str
    verdicts: dict[Verdict, int] = field(default_factory=dict)
    """Each verdict of a group counts: one is spooled, then accepted, then trained."""
    staleness_versions: int = 0
    """Sum over the groups trained on."""

    @property
    def key(self) -> str:
        return self.sampler_id


class Tallies:
    """The tallies of all samplers."""

    def __init__(self, tallies: Iterable[Tally] = ()) -> None:
        self._of = {tally.sampler_id: tally for tally in tallies}

    def apply(self, tally: Tally) -> None:
        self._of[tally.sampler_id] = tally

    def of(self, sampler_id: str) -> Tally:
        return self._of.get(sampler_id) or Tally(sampler_id)

    def after(
        self, verdicts: Iterable[tuple[str, Verdict]], *, staleness: Iterable[tuple[str, int]] = ()
    ) -> tuple[Tally, ...]:
        """Return the tallies that groups change.

        Args:
            verdicts: (sampler, verdict) of each group.
            staleness: (sampler, versions) of each group trained on.
        """
        changed: dict[str, Tally] = {}
        for sampler_id, verdict in verdicts:
            before = changed.get(sampler_id) or self.of(sampler_id)
            counts = {**before.verdicts, verdict: before.verdicts.get(verdict, 0) + 1}
            changed[sampler_id] = Tally(sampler_id, counts, before.staleness_versions)
        for sampler_id, versions in staleness:
            before = changed[sampler_id]
            changed[sampler_id] = replace(before, staleness_versions=before.staleness_versions + versions)
        return tuple(changed.values())

    def total(self) -> Counter[Verdict]:
        """Return the verdicts over all samplers."""
        found: Counter[Verdict] = Counter()
        for tally in self._of.values():
            found.update(tally.verdicts)
        return found

    def delivered(self) -> Mapping[str, int]:
        """Return the groups that each sampler delivered; samplers that delivered none are left out."""
        counts = {name: tally.verdicts.get(Verdict.SPOOLED, 0) for name, tally in self._of.items()}
        return {name: n for name, n in counts.items() if n}

    def staleness_mean(self, sampler_id: str) -> float:
        """Return the mean staleness of a sampler's groups when trained on, versions; 0 before the first."""
        tally = self.of(sampler_id)
        trained = tally.verdicts.get(Verdict.TRAINED, 0)
        return tally.staleness_versions / trained if trained else 0.0
