"""One look at every peer: what metrics show of the fleet, and what an operator should look at; pure.

The look is taken in parts, between which heartbeats are answered, and more seldom in a larger fleet. Peers
that have left or are revoked are counted only.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from node.coordinator.fleet.membership import PeerState
from node.identity.peer import Peer
from node.values.peer_figures import FIGURES, Worst
from node.values.protocol import OURS, Spoken
from node.values.roles import Role
from node.values.run import PeerCount, SamplerStanding, Unusual

Values: TypeAlias = npt.NDArray[np.float64]

SHOWN_SAMPLERS: Final = 16
"""Samplers that metrics name in any case, besides peers that are no samplers: those that joined first
and are heard of."""

WORST_SAMPLERS: Final = 10
"""Samplers that metrics name besides, of each measure."""

NAMED_UNUSUAL: Final = 5

CLOCKS_APART_S: Final = 60.0
"""Offset from which a clock is wrong: above any link's delay, far below what certificates allow."""

TWIN_S: Final = 120.0
"""How long a refused process is told of: several of its retries, which are up to 30 s apart."""

UNSAID_GRADER: Final = (
    "grader code differs and none is refused: set coordinator.grader_digest, or start a verifier"
)

PEERS_PER_PART: Final = 500
"""Looked at between two heartbeats: 5 ms."""

PEERS_PER_S: Final = 1000
"""A fleet of so many is looked at each second, a larger one more seldom: a hundredth of a core."""


def survey_every_s(peers: int) -> float:
    """Return the time between two looks at so many peers."""
    return max(1.0, peers / PEERS_PER_S)


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers of a peer that are compared with others'."""

    version_lag_versions: int
    lag_s: float
    silence_s: float
    clock_offset_s: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers that it reports, by name; see ``node.values.peer_figures``."""


MEASURES: Final = ("version_lag_versions", "lag_s", "silence_s", "clock_offset_s")


@dataclass(frozen=True, slots=True)
class FleetSurvey:
    """The result of one look."""

    counts: Mapping[tuple[Role, PeerState], int]
    standings: Mapping[SamplerStanding, int]
    samplers: Mapping[str, Values]
    """Measure or figure -> its value at each sampler that is here and has it; of clocks, at each peer."""
    named: tuple[tuple[Peer, Measured], ...]
    """The peers that metrics name."""
    unusual: tuple[Unusual, ...]
    grader_codes: int = 0
    """Different ones of the samplers that are here."""
    waits: Mapping[str, int] = field(default_factory=dict)
    """How many of the samplers that are here wait for what; empty name: for nothing."""
    contributors: Mapping[str, str] = field(default_factory=dict)
    """Wait of each contributor that is here, by its name."""

    @property
    def peer_counts(self) -> tuple[PeerCount, ...]:
        return tuple(PeerCount(role, state.value, n) for (role, state), n in sorted(self.counts.items()) if n)


NOTHING_SEEN: Final = FleetSurvey({}, {}, {name: np.zeros(0) for name in (*MEASURES, *FIGURES)}, (), ())


@dataclass(slots=True)
class Surveyor:
    """Takes peers in one after the other."""

    max_staleness_versions: int
    run_grader: bytes
    _counts: Counter[tuple[Role, PeerState]] = field(default_factory=Counter)
    _standings: Counter[SamplerStanding] = field(default_factory=Counter)
    _samplers: list[tuple[Peer, Measured]] = field(default_factory=list)
    _few: list[Measured] = field(default_factory=list)
    """Figures of peers that are not samplers."""
    _silent: set[Peer] = field(default_factory=set)
    _shown: int = 0
    """Samplers among the named ones."""
    _named: dict[Peer, Measured] = field(default_factory=dict)
    _unusual: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    _graders: dict[bytes, list[Peer]] = field(default_factory=dict)
    """Grader code -> the samplers that are here and have it."""
    _waits: Counter[str] = field(default_factory=Counter)
    _contributors: dict[str, str] = field(default_factory=dict)

    def see(
        self,
        peer: Peer,
        state: PeerState,
        measured: Measured,
        *,
        standing: SamplerStanding | None = None,
        grader: bytes = b"",
        twin_for_s: float | None = None,
        speaks: Spoken = OURS,
        waits_for: str = "",
    ) -> None:
        """Take in a peer; ``twin_for_s``: since a second process of its name was refused."""
        self._counts[peer.role, state] += 1
        if state is PeerState.LEFT:
            return
        if standing is not None:
            self._standings[standing] += 1
        if state is PeerState.REVOKED:
            return
        if state is PeerState.SILENT:
            measured = replace(measured, figures={})  # nobody knows how they are now
        is_sampler = peer.role is Role.SAMPLER
        if is_sampler:
            self._samplers.append((peer, measured))
        else:
            self._few.append(measured)
        is_shown = state is not PeerState.SILENT and self._shown < SHOWN_SAMPLERS
        self._shown += is_sampler and is_shown
        if is_sampler and state is not PeerState.SILENT:
            self._waits[waits_for] += 1
        elif peer.role is Role.CONTRIBUTOR and state is not PeerState.SILENT:
            self._contributors[peer.node_id] = waits_for
        if not is_sampler or is_shown:
            self._named[peer] = measured
        if state is PeerState.SILENT:
            self._silent.add(peer)
            self._note(f"{peer.role} silent", measured.silence_s, peer)
        elif is_sampler and measured.version_lag_versions > self.max_staleness_versions:
            self._note("sampler behind by more than the staleness bound", measured.version_lag_versions, peer)
        if abs(measured.clock_offset_s) >= CLOCKS_APART_S:
            side = "behind" if measured.clock_offset_s > 0 else "ahead"
            self._note(f"clock a minute or more {side}", abs(measured.clock_offset_s), peer)
        if standing in (SamplerStanding.QUARANTINED, SamplerStanding.FAILING, SamplerStanding.HOARDS):
            self._note(f"sampler in standing {standing}", 0.0, peer)
        if twin_for_s is not None and twin_for_s <= TWIN_S:
            self._note("second process of the same name refused", -twin_for_s, peer)
        if grader and state is not PeerState.SILENT:
            self._graders.setdefault(grader, []).append(peer)
        if grader not in (b"", self.run_grader) and self.run_grader:
            self._note("grader code other than the run's, leased nothing", 0.0, peer)
        if speaks.protocol < OURS.protocol:
            self._note(f"{peer.role} of an older protocol: upgrade it", 0.0, peer)
        elif speaks.protocol > OURS.protocol:
            self._note(f"{peer.role} of a newer protocol: upgrade the coordinator", 0.0, peer)

    def result(self) -> FleetSurvey:
        """Return the result."""
        numbers = {
            name: np.array([getattr(measured, name) for _, measured in self._samplers], dtype=np.float64)
            for name in MEASURES
        }
        if len(self._graders) > 1 and not self.run_grader:
            for samplers in self._graders.values():
                for place, peer in enumerate(samplers):
                    self._note(UNSAID_GRADER, -place, peer)  # one of each code is named first
        named = dict(self._named)
        is_heard = np.array([peer not in self._silent for peer, _ in self._samplers], dtype=bool)
        for name, values in numbers.items():
            # One that is silent falls behind as well: it would take the places of those that are not.
            badness = np.abs(values) if name == "silence_s" else np.where(is_heard, np.abs(values), 0.0)
            order = np.argsort(-badness, kind="stable")[:WORST_SAMPLERS]
            named |= (self._samplers[n] for n in order.tolist() if badness[n])
        for name, figure in FIGURES.items():
            having = [one for one in self._samplers if name in one[1].figures]
            numbers[name] = np.array([measured.figures[name] for _, measured in having], dtype=np.float64)
            sign = -1 if figure.worst is Worst.HIGHEST else 1
            order = np.argsort(sign * numbers[name], kind="stable")[:WORST_SAMPLERS]
            named |= (having[n] for n in order.tolist() if figure.is_alarming(numbers[name][n]))
        clocks = np.array([measured.clock_offset_s for measured in self._few], dtype=np.float64)
        numbers["clock_offset_s"] = np.concatenate([numbers["clock_offset_s"], clocks])
        return FleetSurvey(
            self._counts,
            self._standings,
            numbers,
            tuple(named.items()),
            tuple(self._all_unusual()),
            grader_codes=len(self._graders),
            waits=self._waits,
            contributors=self._contributors,
        )

    def _note(self, what: str, badness: float, peer: Peer) -> None:
        self._unusual.setdefault(what, []).append((-badness, peer.node_id))

    def _all_unusual(self) -> Iterable[Unusual]:
        for what in sorted(self._unusual, key=_urgency):
            found = self._unusual[what]
            worst = sorted(found)[:NAMED_UNUSUAL]
            yield Unusual(what, len(found), tuple(name for _, name in worst))


_URGENT: Final = ("learner", "relay", "clock", "second process", "grader", "sampler in", "sampler behind")


def _urgency(what: str) -> int:
    return next((place for place, start in enumerate(_URGENT) if what.startswith(start)), len(_URGENT))
