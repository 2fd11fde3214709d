"""The peers of a run: who is here, what each holds and waits for, and which verdicts it has not heard.

Nothing here outlives the process, because peers
report it all again when they join. What is dropped when a peer

    falls silent    its metrics, and its place among those shown
    leaves          the same at once; silence for GONE_AFTER_S counts as leaving
    is forgotten    its row, lag and pending verdicts: past PEERS_REMEMBERED, those that left first

A sampler's heartbeat costs the same however many peers there are; ``expire``, ``rows`` and the learner's look
at all of them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.fleet.membership import KnownPeer, Membership, PeerState
from node.coordinator.fleet.pending_verdicts import PendingVerdicts
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.agreement import NOT_AGREED, agreed_grader
from node.identity.peer import Peer
from node.limits import VERDICTS_PER_HEARTBEAT
from node.policy import PolicyVersion
from node.rollout import GroupVerdict, Verdict
from node.run import PeerStatus, Role, StepReport, Teaching
from node.telemetry.fleet_collector import METRICS_EVERY_S, FleetCollector
from node.telemetry.metrics import MetricFamily

PENDING_VERDICTS: Final = 4 * VERDICTS_PER_HEARTBEAT
"""Verdicts kept for a sampler that does not heartbeat; then the oldest go. The ledger counts them all."""

_WAITS_FOR_CHARACTERS: Final = 100


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    held: PolicyVersion | None
    clock_offset_s: float = 0.0
    waits_for: str = ""
    metrics: tuple[MetricFamily, ...] = ()
    """Empty: as before."""
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
    metrics_every_s: float | None
    """How often the peer is to send its metrics; None: they are not shown."""
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
        head: Callable[[], PolicyVersion | None],
        revoked: Callable[[], Collection[str]],
        fleet: FleetCollector,
        metrics: CoordinatorMetrics,
        grader_digest: bytes = b"",
    ) -> None:
        """Begin empty; ``grader_digest`` as configured, or empty: as samplers agree."""
        self._accounts = accounts
        self._membership = Membership(silent_after_s=silent_after_s)
        self._head = head
        self._revoked = revoked
        self._fleet = fleet
        self._metrics = metrics
        self._reports: dict[Peer, HeartbeatReport] = {}
        """The newest of each peer, without its metrics."""
        self._configured_grader = grader_digest
        self._graders: dict[str, bytes] = {}
        """Node id of a sampler -> digest of its grader code."""
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
    ) -> KnownPeer:
        """Admit a peer, or admit it again; see ``Membership.join``."""
        member = self._membership.join(peer, now, instance=instance, completes=completes)
        self._reports[peer] = HeartbeatReport(held)
        self._fleet.admit(peer)
        if grader_digest:
            self._graders[peer.node_id] = grader_digest
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

    def shows_metrics_of(self, peer: Peer) -> bool:
        """Return whether the metrics of a peer are shown, so that a heartbeat's are worth reading."""
        return self._fleet.shows(peer)

    def heartbeat(self, peer: Peer, heartbeat: HeartbeatReport, *, now: float) -> HeartbeatAnswer:
        """Note a heartbeat and return its answer. Raises RefusedError: NOT_JOINED; NAME_IN_USE."""
        self._membership.heartbeat(peer, now, instance=heartbeat.instance)
        self._reports[peer] = replace(
            heartbeat, metrics=(), waits_for=heartbeat.waits_for[:_WAITS_FOR_CHARACTERS]
        )
        is_shown = self._fleet.admit(peer)  # again: a peer that fell silent gave up its place
        if heartbeat.metrics:
            self._fleet.update(peer, heartbeat.metrics)
        if heartbeat.step is not None:
            self.step = heartbeat.step
        if peer.role is Role.LEARNER and heartbeat.teaching is not None:
            self.teaching = heartbeat.teaching
        answer = HeartbeatAnswer(
            self.head,
            self._verdicts_for(peer, has_heard=heartbeat.has_heard),
            self._must_repair(heartbeat.held),
            METRICS_EVERY_S if is_shown else None,
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
        learners = (report for peer, report in self._reports.items() if peer.role is Role.LEARNER)
        return next((one.best_version for one in learners if one.best_version is not None), None)

    def leave(self, peer: Peer) -> None:
        self._membership.leave(peer)
        self._fleet.drop(peer)

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
        changed = self._membership.expire(now)
        for member in changed:
            self._fleet.drop(member.peer)
        known = {member.peer for member in self._membership.members}
        for peer in self._reports.keys() - known:
            del self._reports[peer]
        samplers = {peer.node_id for peer in known if peer.role is Role.SAMPLER}
        for sampler_id in self._graders.keys() - samplers:
            del self._graders[sampler_id]
        self._agree_on_grader()
        for sampler_id in self._pending.keys() - samplers:
            self._metrics.dropped_verdicts.inc(len(self._pending.pop(sampler_id)))
        return changed

    def rows(self, now: float) -> tuple[PeerStatus, ...]:
        """Return the lag table, in the order of first joining."""
        head, revoked, oldest = self.head, frozenset(self._revoked()), self._accounts.slots.oldest_leases()
        return tuple(self._row(each, head, revoked, oldest, now=now) for each in self._membership.members)

    def _row(
        self,
        member: KnownPeer,
        head: PolicyVersion | None,
        revoked: Collection[str],
        oldest: Mapping[str, float],
        *,
        now: float,
    ) -> PeerStatus:
        peer, report = member.peer, self._reports[member.peer]
        lag_versions, lag_s = self._accounts.versions.lag(report.held, head, now=now)
        row = PeerStatus(
            node_id=peer.node_id,
            role=peer.role,
            state=(PeerState.REVOKED if peer.node_id in revoked else member.state).value,
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
        )
        return self._as_sampler(row, oldest, now) if peer.role is Role.SAMPLER else row

    def _as_sampler(self, row: PeerStatus, oldest: Mapping[str, float], now: float) -> PeerStatus:
        name, accounts = row.node_id, self._accounts
        held, oldest_s = accounts.held(name), max(0.0, now - oldest.get(name, now))
        verdicts = accounts.verdicts_of(name)
        standing, detail = accounts.standings.word(
            name,
            delivered=verdicts.get(Verdict.SPOOLED, 0),
            held=held,
            oldest_s=oldest_s,
            max_age_s=accounts.max_age_s(name),
            now=now,
        )
        return replace(
            row,
            verdicts={verdict.value: n for verdict, n in verdicts.items()},
            staleness_mean_versions=accounts.staleness_mean(name),
            grader_digest=self._graders.get(name, b""),
            leases=held,
            lease_allowance=accounts.standings.of(name).allowance,
            oldest_lease_s=oldest_s,
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
