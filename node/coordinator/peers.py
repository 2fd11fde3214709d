"""The peers of a run: who is here, what each holds and waits for, and which verdicts it has not heard.

Nothing here outlives the process, because peers
report it all again when they join. What is dropped when a peer

    falls silent    its metrics, and its place among those shown by name
    leaves          the same at once; silence for GONE_AFTER_S counts as leaving
    is forgotten    its row, lag and pending verdicts: past PEERS_REMEMBERED, those that left first

A sampler's heartbeat or join costs the same however many peers there are. ``expire``, ``page``, a survey and
the learner's heartbeat look at all of them, with little work for each.
"""

import heapq
import random as randomness
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from node.coordinator.fleet.heartbeat_pause import drawn_pause_s, pause_s, silence_s
from node.coordinator.fleet.membership import KnownPeer, Membership, PeerState
from node.coordinator.fleet.pending_verdicts import PendingVerdicts
from node.coordinator.fleet.survey import (
    NOTHING_SEEN,
    PEERS_PER_PART,
    FleetSurvey,
    Measured,
    Surveyor,
    survey_every_s,
)
from node.coordinator.fleet.wait_chain import WaitingSamplers
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.agreement import NOT_AGREED, agreed_grader
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.limits import VERDICTS_PER_HEARTBEAT
from node.policy import PolicyVersion
from node.protocol import OURS, Spoken
from node.rollout import GroupVerdict, Verdict
from node.run import (
    MEMBER_ROLES,
    MOST_PEERS_A_PAGE,
    PEER_ORDERS,
    PEERS_A_PAGE,
    PeerQuery,
    PeerStatus,
    Role,
    SamplerStanding,
    StepReport,
    Teaching,
)
from node.telemetry.fleet_collector import FleetCollector
from node.telemetry.metrics import MetricFamily

PENDING_VERDICTS: Final = 4 * VERDICTS_PER_HEARTBEAT
"""Verdicts kept for a sampler that does not heartbeat; then the oldest go. The ledger counts them all."""

_GRADERS_AT_ONCE: Final = 64
"""Up to so many samplers, what they agree on is found at each join; of more, at the next ``expire``."""

_VALUES_OF_A_CONDITION: Final = 8

_WAITING_NAMED: Final = 3
"""Samplers named of those that wait for the same."""


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    held: PolicyVersion | None
    clock_offset_s: float = 0.0
    waits_for: str = ""
    step: StepReport | None = None
    teaching: Teaching | None = None
    has_heard: bool = False
    """Whether the answer before arrived: a peer writes the next heartbeat of a stream only then."""
    instance: str = ""
    best_version: int | None = None
    """Learners: as written down for ``export --best``."""


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    head: PolicyVersion | None
    verdicts: tuple[GroupVerdict, ...]
    must_repair: bool
    metrics_every_s: float
    """How often the peer is to send its metrics."""
    wants_whole_metrics: bool
    """Whether values alone would say nothing."""
    next_heartbeat_s: float | None
    """When the peer is to send its next heartbeat; None: after the configured interval."""
    longest_lag_versions: int = 0
    """The furthest any sampler is behind; this and the following fields are for learners only."""
    best_version: int | None = None
    """On held-out prompts; None: no version was evaluated."""
    evaluating_version: int | None = None
    is_evaluated: bool = False


class Peers:
    """Every peer known to this process."""

    def __init__(
        self,
        accounts: Accounts,
        *,
        silent_after_s: float,
        heartbeat_interval_s: float,
        head: Callable[[], PolicyVersion | None],
        revoked: Callable[[], Collection[str]],
        fleet: FleetCollector,
        metrics: CoordinatorMetrics,
        grader_digest: bytes = b"",
        random: Callable[[], float] = randomness.random,
    ) -> None:
        """Begin empty; ``grader_digest`` as configured, or empty: as samplers agree.

        ``random`` returns numbers in [0, 1), by which heartbeats are spread out.
        """
        self._accounts = accounts
        self._silent_after_s = silent_after_s
        self._heartbeat_interval_s = heartbeat_interval_s
        self._random = random
        self._pause_s = heartbeat_interval_s
        """Mean time between two heartbeats of a sampler."""
        self._membership = Membership(silent_after_s=silent_after_s)
        self._head = head
        self._revoked = revoked
        self._fleet = fleet
        self._metrics = metrics
        self._reports: dict[Peer, HeartbeatReport] = {}
        """The newest of each peer."""
        self._waits_since_s: dict[Peer, float] = {}
        """Since when each peer names the wait that it names now."""
        self._speaks: dict[Peer, Spoken] = {}
        self._few: dict[Peer, None] = {}
        """Known peers that are no samplers."""
        self._samplers: set[str] = set()
        """Node ids of known samplers."""
        self._survey = NOTHING_SEEN
        self._surveyed_at_s = float("-inf")
        self._configured_grader = grader_digest
        self._graders: dict[str, bytes] = {}
        """Node id of a sampler -> digest of its grader code."""
        self._is_grader_due = False
        """Whether what samplers agree on may have changed."""
        accounts.grader = agreed_grader(NOT_AGREED, {}, configured=grader_digest)
        self._pending: dict[str, PendingVerdicts] = {}
        self.step: StepReport | None = None
        self.teaching: Teaching | None = None

    @property
    def head(self) -> PolicyVersion | None:
        """The newest announced version; None before the first."""
        return self._head()

    def join(
        self,
        peer: Peer,
        held: PolicyVersion | None,
        *,
        now: float,
        instance: str = "",
        completes: bool = False,
        grader_digest: bytes = b"",
        speaks: Spoken = OURS,
    ) -> KnownPeer:
        """Admit a peer, or admit it again; see ``Membership.join``."""
        member = self._membership.join(peer, now, instance=instance, completes=completes)
        self._reports[peer] = HeartbeatReport(held)
        self._waits_since_s[peer] = now
        self._speaks[peer] = speaks
        if peer.role is Role.SAMPLER:
            self._samplers.add(peer.node_id)
        else:
            self._few[peer] = None
        self._fleet.admit(peer)
        if grader_digest:
            self._graders[peer.node_id] = grader_digest
            self._is_grader_due = True
            if len(self._graders) <= _GRADERS_AT_ONCE:
                self._agree_on_grader()
        return member

    def instance(self, peer: Peer) -> str:
        return self._membership.instance(peer)

    def objection_to_grader(self, peer: Peer) -> str:
        """Return how a sampler's grader code differs from the run's; empty where it does not."""
        return self._accounts.grader.objection(self._graders.get(peer.node_id, b""))

    def check_present(self, peer: Peer) -> None:
        """Check that a peer has joined. Raises RefusedError: NOT_JOINED."""
        self._membership.present(peer)

    def heartbeat(
        self,
        peer: Peer,
        heartbeat: HeartbeatReport,
        *,
        now: float,
        metrics: Sequence[MetricFamily] = (),
        metric_values: Sequence[float] = (),
    ) -> HeartbeatAnswer:
        """Note a heartbeat and return its answer. Raises RefusedError: NOT_JOINED; NAME_IN_USE.

        ``metrics`` are whole; ``metric_values`` are new values of those; both empty: as before.
        """
        if self._membership.heartbeat(peer, now, instance=heartbeat.instance):
            self._is_grader_due = True
        if self._reports[peer].waits_for != heartbeat.waits_for:
            self._waits_since_s[peer] = now
        self._reports[peer] = heartbeat
        self._fleet.admit(peer)  # again: a peer that fell silent gave up its place
        if metrics:
            self._fleet.update(peer, metrics)
        elif metric_values:
            self._fleet.update_values(peer, metric_values)
        if heartbeat.step is not None:
            self.step = heartbeat.step
        if peer.role is Role.LEARNER and heartbeat.teaching is not None:
            self.teaching = heartbeat.teaching
        answer = HeartbeatAnswer(
            self.head,
            self._verdicts_for(peer, has_heard=heartbeat.has_heard),
            self._must_repair(heartbeat.held),
            self._fleet.metrics_every_s,
            not self._fleet.is_known(peer),
            self._next_heartbeat_s(peer),
        )
        if peer.role is not Role.LEARNER:
            return answer
        best = self._accounts.evaluations.status.best
        head = 0 if self.head is None else self.head.number
        return replace(
            answer,
            longest_lag_versions=self._longest_lag(),
            best_version=None if best is None else best.version,
            evaluating_version=self._accounts.evaluations.awaited_version(head),
            is_evaluated=self._accounts.evaluations.is_configured,
        )

    @property
    def exportable_best(self) -> int | None:
        """The best version as the learner has written it down; None: it has not, or is not there."""
        learners = (self._reports[peer] for peer in self._few if peer.role is Role.LEARNER)
        return next((one.best_version for one in learners if one.best_version is not None), None)

    def leave(self, peer: Peer) -> None:
        self._membership.leave(peer)
        self._fleet.drop(peer)
        self._is_grader_due = self._is_grader_due or peer.node_id in self._graders

    def disconnected(self, peer: Peer) -> None:
        """Note that a peer's stream ended, in whatever order."""
        self._membership.disconnected(peer)

    def count_twin(self) -> None:
        """Count a process that was refused because another of its name is here."""
        self._metrics.refused_twins.inc()

    def notify(self, sampler_id: str, verdict: GroupVerdict) -> None:
        """Keep a verdict until the sampler has heard it in the answer to a heartbeat."""
        pending = self._pending.setdefault(sampler_id, PendingVerdicts(capacity=PENDING_VERDICTS))
        self._metrics.dropped_verdicts.inc(pending.put(verdict))

    def expire(self, now: float) -> tuple[KnownPeer, ...]:
        """Note who has fallen silent, drop what was kept for those that left; return who changed."""
        self._pause_s = pause_s(
            interval_s=self._heartbeat_interval_s,
            peers=self._membership.present_peers,
            lease_ttl_s=self._accounts.terms.lease_ttl_s,
        )
        self._membership.be_patient(silence_s(configured_s=self._silent_after_s, pause_s=self._pause_s))
        changed = self._membership.expire(now)
        for member in changed:
            self._fleet.drop(member.peer)
        if changed:
            self._is_grader_due = True
        if len(self._reports) > len(self._membership):
            self._forget()
        if self._is_grader_due:
            self._agree_on_grader()
        for sampler_id in self._pending.keys() - self._samplers:
            self._metrics.dropped_verdicts.inc(len(self._pending.pop(sampler_id)))
        self._metrics.heartbeat_pause.set(self._pause_s)
        return changed

    def page(self, query: PeerQuery, now: float) -> tuple[tuple[PeerStatus, ...], int]:
        """Return the rows that a query asks for, and how many peers meet its conditions.

        Raises RefusedError: MALFORMED; there is no such state, role, standing, order or page.
        """
        _check(query)
        view = self._view(now)
        members: Sequence[KnownPeer] = self._membership.members
        if query.states or query.roles or query.standings or query.name or query.waits_for:
            members = [member for member in members if self._meets(member, query, view)]
        members = self._sorted(members, query, view)
        last = query.offset + (query.limit or PEERS_A_PAGE)
        return tuple(self._row(one, view) for one in members[query.offset : last]), len(members)

    def survey_parts(self, now: float) -> Iterator[None]:
        """Look at all peers if it is time, in parts between which heartbeats may be answered."""
        if now < self._surveyed_at_s + survey_every_s(len(self._membership)) and now >= self._surveyed_at_s:
            return
        self._surveyed_at_s = now
        surveyor = Surveyor(
            self._fleet.named(),
            self._accounts.terms.bounds.max_staleness_versions,
            self._accounts.grader.digest,
        )
        view = self._view(now)
        for number, member in enumerate(self._membership.members, start=1):
            report = self._reports.get(member.peer)
            if report is not None:
                self._see(surveyor, member, report, view)
            if number % PEERS_PER_PART == 0:
                yield
        self._survey = surveyor.result()

    @property
    def survey(self) -> FleetSurvey:
        """The result of the last look at all peers."""
        return self._survey

    def unheard_s(self, role: Role, now: float) -> float | None:
        """Return the time since a peer of the role was last heard of; None: none ever was."""
        seen = [one.last_seen_s for one in self._membership.members if one.peer.role is role]
        return max(0.0, now - max(seen)) if seen else None

    def live(self, role: Role) -> int:
        """Return how many peers of the role are in the run and not silent."""
        return sum(
            self._membership.counts.get((role, state), 0) for state in (PeerState.JOINED, PeerState.LIVE)
        )

    def learner_waits_for(self) -> str:
        """Return what the learner waits for; empty: nothing, or it is not here."""
        return next((self._reports[peer].waits_for for peer in self._few if peer.role is Role.LEARNER), "")

    def learner_waits_s(self, now: float) -> float:
        """Return how long the learner has named that wait; 0 where it is not here."""
        learners = (self._waits_since_s[peer] for peer in self._few if peer.role is Role.LEARNER)
        return max(0.0, now - next(learners, now))

    def waiting_samplers(self, now: float) -> tuple[WaitingSamplers, ...]:
        """Return the samplers that are here, by what they wait for."""
        by_wait: dict[str, list[tuple[float, str]]] = {}
        for member in self._membership.members:
            peer = member.peer
            if peer.role is Role.SAMPLER and member.state in (PeerState.JOINED, PeerState.LIVE):
                waits = by_wait.setdefault(self._reports[peer].waits_for, [])
                waits.append((self._waits_since_s[peer], peer.node_id))
        return tuple(
            WaitingSamplers(
                waits_for,
                tuple(name for _, name in heapq.nsmallest(_WAITING_NAMED, waits)),
                len(waits),
                max(0.0, now - min(waits)[0]),
            )
            for waits_for, waits in by_wait.items()
        )

    def _forget(self) -> None:
        for peer in [peer for peer in self._reports if peer not in self._membership]:
            del self._reports[peer], self._waits_since_s[peer], self._speaks[peer]
            self._few.pop(peer, None)
            if peer.role is Role.SAMPLER:
                self._samplers.discard(peer.node_id)
                self._graders.pop(peer.node_id, None)

    def _next_heartbeat_s(self, peer: Peer) -> float | None:
        """Return when a peer is to send its next heartbeat; None: after the configured interval."""
        if peer.role is not Role.SAMPLER or self._pause_s <= self._heartbeat_interval_s:
            return None
        return drawn_pause_s(self._pause_s, self._random())

    def _view(self, now: float) -> "_View":
        return _View(
            now, self.head, frozenset(self._revoked()), self._accounts.slots.oldest_leases(), self._accounts
        )

    def _meets(self, member: KnownPeer, query: PeerQuery, view: "_View") -> bool:
        peer = member.peer
        if query.roles and peer.role not in query.roles:
            return False
        if query.states and view.state(member) not in query.states:
            return False
        if query.name not in peer.node_id or query.waits_for not in self._reports[peer].waits_for:
            return False
        if not query.standings:
            return True
        return peer.role is Role.SAMPLER and view.standing(peer.node_id)[0] in query.standings

    def _sorted(self, members: Sequence[KnownPeer], query: PeerQuery, view: "_View") -> Sequence[KnownPeer]:
        order, reports = query.sort_by or PEER_ORDERS[0], self._reports
        if order == "joined":
            return members[::-1] if query.is_reversed else members
        if order == "name":
            return sorted(members, key=lambda one: one.peer.node_id, reverse=query.is_reversed)
        keys: dict[str, Callable[[KnownPeer], float]] = {
            "behind": lambda one: view.lag(reports[one.peer].held)[0],
            "lag": lambda one: view.lag(reports[one.peer].held)[1],
            "seen": lambda one: view.now - one.last_seen_s,
            "clock": lambda one: abs(reports[one.peer].clock_offset_s),
            "leases": lambda one: self._accounts.held(one.peer.node_id),
        }
        return sorted(members, key=keys[order], reverse=not query.is_reversed)

    def _see(self, surveyor: Surveyor, member: KnownPeer, report: HeartbeatReport, view: "_View") -> None:
        peer, name = member.peer, member.peer.node_id
        behind, lag_s = view.lag(report.held)
        is_sampler = peer.role is Role.SAMPLER
        surveyor.see(
            peer,
            view.state(member),
            Measured(behind, lag_s, max(0.0, view.now - member.last_seen_s), report.clock_offset_s),
            standing=view.standing(name)[0] if is_sampler else None,
            grader=self._graders.get(name, b"") if is_sampler else b"",
            twin_for_s=max(0.0, view.now - member.refused_twin_at_s) if member.refused_twins else None,
            speaks=self._speaks[peer],
        )

    def _row(self, member: KnownPeer, view: "_View") -> PeerStatus:
        peer, report, now = member.peer, self._reports[member.peer], view.now
        lag_versions, lag_s = view.lag(report.held)
        row = PeerStatus(
            node_id=peer.node_id,
            role=peer.role,
            state=view.state(member).value,
            held=report.held,
            version_lag_versions=lag_versions,
            lag_s=lag_s,
            last_seen_s=max(0.0, now - member.last_seen_s),
            clock_offset_s=report.clock_offset_s,
            waits_for=report.waits_for,
            verdicts={},
            staleness_mean_versions=0.0,
            joins=member.joins,
            refused_twins=member.refused_twins,
            refused_twin_s=max(0.0, now - member.refused_twin_at_s) if member.refused_twins else 0.0,
            software_version=self._speaks[peer].software_version,
            protocol=self._speaks[peer].protocol,
        )
        return self._as_sampler(row, view) if peer.role is Role.SAMPLER else row

    def _as_sampler(self, row: PeerStatus, view: "_View") -> PeerStatus:
        name, accounts = row.node_id, self._accounts
        standing, detail = view.standing(name)
        return replace(
            row,
            verdicts={verdict.value: n for verdict, n in accounts.verdicts_of(name).items()},
            staleness_mean_versions=accounts.staleness_mean(name),
            grader_digest=self._graders.get(name, b""),
            leases=accounts.held(name),
            lease_allowance=accounts.standings.of(name).allowance,
            oldest_lease_s=view.oldest_lease_s(name),
            standing=standing.value,
            standing_detail=detail,
        )

    def _longest_lag(self) -> int:
        """Return the versions to the head of the sampler furthest behind that holds more than the base."""
        head = 0 if self.head is None else self.head.number
        held = (
            self._reports[member.peer].held
            for member in self._membership.members
            if member.peer.role is Role.SAMPLER and member.state is not PeerState.LEFT
        )
        return max(
            (head - one.number for one in held if one is not None and 0 < one.number < head), default=0
        )

    def _agree_on_grader(self) -> None:
        self._is_grader_due = False
        present = self._graders_present()
        self._accounts.grader = agreed_grader(
            self._accounts.grader, present, configured=self._configured_grader
        )
        self._metrics.grader_digests.set(len(set(present.values())))

    def _graders_present(self) -> dict[str, bytes]:
        return {
            member.peer.node_id: self._graders[member.peer.node_id]
            for member in self._membership.members
            if member.peer.role is Role.SAMPLER
            and member.state in (PeerState.JOINED, PeerState.LIVE)
            and member.peer.node_id in self._graders
        }

    def _verdicts_for(self, peer: Peer, *, has_heard: bool) -> tuple[GroupVerdict, ...]:
        pending = self._pending.get(peer.node_id) if peer.role is Role.SAMPLER else None
        return () if pending is None else pending.take(VERDICTS_PER_HEARTBEAT, has_heard=has_heard)

    def _must_repair(self, held: PolicyVersion | None) -> bool:
        if held is None or not held.root:
            return False
        signed_root = self._accounts.versions.root_of(held.number)
        return signed_root is not None and signed_root != held.root


@dataclass(slots=True)
class _View:
    """One moment, at which peers are looked at; what many of them share is worked out once."""

    now: float
    head: PolicyVersion | None
    revoked: Collection[str]
    oldest_leases: Mapping[str, float]
    """Sampler -> when its oldest lease was granted."""
    accounts: Accounts
    _lags: dict[int | None, tuple[int, float]] = field(default_factory=dict)

    def state(self, member: KnownPeer) -> PeerState:
        return PeerState.REVOKED if member.peer.node_id in self.revoked else member.state

    def lag(self, held: PolicyVersion | None) -> tuple[int, float]:
        """Return versions and seconds to the head; see ``VersionLog.lag``, which looks at all versions."""
        number = None if held is None else held.number
        if (known := self._lags.get(number)) is not None:
            return known
        lag = self._lags[number] = self.accounts.versions.lag(held, self.head, now=self.now)
        return lag

    def oldest_lease_s(self, sampler_id: str) -> float:
        return max(0.0, self.now - self.oldest_leases.get(sampler_id, self.now))

    def standing(self, sampler_id: str) -> tuple[SamplerStanding, str]:
        accounts = self.accounts
        return accounts.standings.word(
            sampler_id,
            delivered=accounts.verdicts_of(sampler_id).get(Verdict.SPOOLED, 0),
            held=accounts.held(sampler_id),
            oldest_s=self.oldest_lease_s(sampler_id),
            max_age_s=accounts.max_age_s(sampler_id),
            now=self.now,
        )


_CLOSED: Final[dict[str, frozenset[str]]] = {
    "states": frozenset(PeerState),
    "roles": frozenset(MEMBER_ROLES),
    "standings": frozenset(SamplerStanding),
    "sort_by": frozenset({"", *PEER_ORDERS}),
}


def _check(query: PeerQuery) -> None:
    for name, allowed in _CLOSED.items():
        said = getattr(query, name)
        wrong = sorted(
            {said} - allowed if isinstance(said, str) else set(said[:_VALUES_OF_A_CONDITION]) - allowed
        )
        if wrong or (not isinstance(said, str) and len(said) > _VALUES_OF_A_CONDITION):
            raise RefusedError(
                Reason.MALFORMED,
                f"a query for peers with {name} = {wrong[0][:50] if wrong else len(said)!r}",
                fix=f"allowed are {', '.join(sorted(filter(None, allowed)))}",
            )
    if query.offset < 0 or not 0 <= query.limit <= MOST_PEERS_A_PAGE:
        raise RefusedError(
            Reason.MALFORMED,
            f"a page of {query.limit} peers from the {query.offset}th on",
            fix=f"ask for 1 to {MOST_PEERS_A_PAGE} peers, from the 0th or a later one on",
        )
