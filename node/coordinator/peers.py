"""The peers of a run: who is here, what each holds and waits for, and which verdicts it has not heard.

Nothing here outlives the process, because peers report it all again when they join. A peer that is silent for
GONE_AFTER_S counts as one that left. Past PEERS_REMEMBERED, those that left first are forgotten: row, lag,
numbers and pending verdicts.

A sampler's heartbeat or join costs the same however many peers there are. ``expire`` and the learner's
heartbeat look at all of them, with little work for each.
"""

import random as randomness
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.fleet.heartbeat_pause import drawn_pause_s, pause_s, silence_s
from node.coordinator.fleet.membership import KnownPeer, Membership, PeerState
from node.coordinator.fleet.pending_verdicts import PendingVerdicts
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.task_check import UNSAID, run_grader
from node.identity.peer import Peer
from node.limits import VERDICTS_PER_HEARTBEAT
from node.peer_figures import MachineFigures, SamplerFigures
from node.policy import PolicyVersion
from node.protocol import OURS, Spoken
from node.run import Role, StepReport, Teaching, Unusual
from node.verdict import GroupVerdict

PENDING_VERDICTS: Final = 4 * VERDICTS_PER_HEARTBEAT
"""Verdicts kept for a sampler that does not heartbeat; then the oldest go. The ledger counts them all."""


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
    changes: tuple[str, ...] = ()
    """Learners: what an operator has changed lately, newest first."""
    machine: MachineFigures | None = None
    """None, as of the next one: as it said before."""
    sampler: SamplerFigures | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    head: PolicyVersion | None
    verdicts: tuple[GroupVerdict, ...]
    must_repair: bool
    next_heartbeat_s: float | None
    """When the peer is to send its next heartbeat; None: after the configured interval."""
    longest_lag_versions: int = 0
    """The furthest any sampler is behind; this and the following fields are for learners only."""
    best_version: int | None = None
    """On held-out prompts; None: no version has a score."""
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
        metrics: CoordinatorMetrics,
        grader_digest: bytes = b"",
        random: Callable[[], float] = randomness.random,
    ) -> None:
        """Begin empty; ``grader_digest`` as configured, or empty: as verifiers say.

        ``random`` returns numbers in [0, 1), by which heartbeats are spread out.
        """
        self.accounts = accounts
        self._silent_after_s = silent_after_s
        self._heartbeat_interval_s = heartbeat_interval_s
        self._random = random
        self._pause_s = heartbeat_interval_s
        """Mean time between two heartbeats of a sampler."""
        self._membership = Membership(silent_after_s=silent_after_s)
        self._head = head
        self._metrics = metrics
        self._reports: dict[Peer, HeartbeatReport] = {}
        """The newest of each peer."""
        self._machines: dict[Peer, MachineFigures] = {}
        self._work: dict[Peer, SamplerFigures] = {}
        """The numbers that each sampler reported last."""
        self._waits_since_s: dict[Peer, float] = {}
        """Since when each peer names the wait that it names now."""
        self._speaks: dict[Peer, Spoken] = {}
        self._few: dict[Peer, None] = {}
        """Known peers that are no samplers."""
        self._samplers: set[str] = set()
        """Node ids of known samplers."""
        self._configured_grader = grader_digest
        self._graders: dict[Peer, bytes] = {}
        """Sampler or verifier -> digest of its grader code."""
        accounts.grader = run_grader(UNSAID, configured=grader_digest, verifiers={})
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
        if grader_digest:
            self._graders[peer] = grader_digest
            if peer.role is Role.VERIFIER:
                self._ask_verifiers()
        return member

    def instance(self, peer: Peer) -> str:
        return self._membership.instance(peer)

    def objection_to_grader(self, peer: Peer) -> str:
        """Return how a peer's grader code differs from the run's; empty where it does not."""
        work, digest = self.accounts.work, self.grader_of(peer)
        return (
            work.objection_to_grader(digest) if peer.role is Role.SAMPLER else work.grader.objection(digest)
        )

    def check_present(self, peer: Peer) -> None:
        """Check that a peer has joined. Raises RefusedError: NOT_JOINED."""
        self._membership.present(peer)

    def heartbeat(
        self,
        peer: Peer,
        heartbeat: HeartbeatReport,
        *,
        now: float,
    ) -> HeartbeatAnswer:
        """Note a heartbeat and return its answer. Raises RefusedError: NOT_JOINED; NAME_IN_USE."""
        is_back = self._membership.heartbeat(peer, now, instance=heartbeat.instance)
        if is_back and peer.role is Role.VERIFIER:
            self._ask_verifiers()
        if self._reports[peer].waits_for != heartbeat.waits_for:
            self._waits_since_s[peer] = now
        self._reports[peer] = heartbeat
        if heartbeat.machine is not None:
            self._machines[peer] = heartbeat.machine
        if heartbeat.sampler is not None:
            self._work[peer] = heartbeat.sampler
        if heartbeat.step is not None:
            self.step = heartbeat.step
        if peer.role is Role.LEARNER and heartbeat.teaching is not None:
            self.teaching = heartbeat.teaching
        answer = HeartbeatAnswer(
            self.head,
            self._verdicts_for(peer, has_heard=heartbeat.has_heard),
            self._must_repair(heartbeat.held),
            self._next_heartbeat_s(peer),
        )
        if peer.role is not Role.LEARNER:
            return answer
        best = self.accounts.evaluations.status.best
        head = 0 if self.head is None else self.head.number
        return replace(
            answer,
            longest_lag_versions=self._longest_lag(),
            best_version=None if best is None else best.version,
            evaluating_version=self.accounts.evaluations.awaited_version(head),
            is_evaluated=self.accounts.evaluations.is_configured,
        )

    def lease_pause_s(self, least_s: float) -> float:
        """Return when a sampler that was leased nothing is to ask again: later in a larger fleet.

        A request costs what a heartbeat costs. A wait that is longer than the fleet's, as in a quarantine,
        ends when it ends.
        """
        present, ttl_s = self._membership.present_peers, self.accounts.terms.lease_ttl_s
        mean_s = pause_s(interval_s=least_s, peers=present, lease_ttl_s=ttl_s)
        return least_s if mean_s == least_s else max(least_s, drawn_pause_s(mean_s, self._random()))

    @property
    def pause_s(self) -> float:
        """Mean time between two heartbeats of a sampler."""
        return self._pause_s

    @property
    def members(self) -> tuple[KnownPeer, ...]:
        """Every peer known, in the order of their first join."""
        return self._membership.members

    def __len__(self) -> int:
        return len(self._membership)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._reports

    def report(self, peer: Peer) -> HeartbeatReport:
        """Return the newest report of a known peer."""
        return self._reports[peer]

    def figures(self, peer: Peer) -> tuple[MachineFigures | None, SamplerFigures | None]:
        """Return the numbers that a peer reported last."""
        return self._machines.get(peer), self._work.get(peer)

    def waits_since_s(self, peer: Peer) -> float:
        """Return since when a known peer names the wait that it names now."""
        return self._waits_since_s[peer]

    def speaks(self, peer: Peer) -> Spoken:
        """Return the protocols and the software of a known peer."""
        return self._speaks[peer]

    def grader_of(self, peer: Peer) -> bytes:
        """Return the digest of a peer's grader code; empty: it did not say."""
        return self._graders.get(peer, b"")

    def live(self, role: Role) -> int:
        """Return how many peers of the role are in the run and not silent."""
        counts = self._membership.counts
        return sum(counts.get((role, state), 0) for state in (PeerState.JOINED, PeerState.LIVE))

    @property
    def learner(self) -> Peer | None:
        """The learner known for the longest; None: there is none."""
        return next((peer for peer in self._few if peer.role is Role.LEARNER), None)

    @property
    def exportable_best(self) -> int | None:
        """The best version as the learner has written it down; None: it has not, or is not there."""
        learners = (self._reports[peer] for peer in self._few if peer.role is Role.LEARNER)
        return next((one.best_version for one in learners if one.best_version is not None), None)

    @property
    def changes(self) -> tuple[Unusual, ...]:
        """Changes that operators made in the learner lately."""
        learners = (peer for peer in self._few if peer.role is Role.LEARNER)
        return tuple(
            Unusual(f"learner with {what}", 1, (peer.node_id,))
            for peer in learners
            for what in self._reports[peer].changes
        )

    def leave(self, peer: Peer) -> None:
        self._membership.leave(peer)
        if peer.role is Role.VERIFIER:
            self._ask_verifiers()

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
            lease_ttl_s=self.accounts.terms.lease_ttl_s,
        )
        self._membership.be_patient(silence_s(configured_s=self._silent_after_s, pause_s=self._pause_s))
        changed = self._membership.expire(now)
        if len(self._reports) > len(self._membership):
            self._forget()
        if any(member.peer.role is Role.VERIFIER for member in changed):
            self._ask_verifiers()
        for sampler_id in self._pending.keys() - self._samplers:
            self._metrics.dropped_verdicts.inc(len(self._pending.pop(sampler_id)))
        self._metrics.heartbeat_pause.set(self._pause_s)
        return changed

    def _forget(self) -> None:
        for peer in [peer for peer in self._reports if peer not in self._membership]:
            del self._reports[peer], self._waits_since_s[peer], self._speaks[peer]
            self._few.pop(peer, None)
            self._graders.pop(peer, None)
            self._machines.pop(peer, None)
            self._work.pop(peer, None)
            if peer.role is Role.SAMPLER:
                self._samplers.discard(peer.node_id)

    def _next_heartbeat_s(self, peer: Peer) -> float | None:
        """Return when a peer is to send its next heartbeat; None: after the configured interval."""
        if peer.role is not Role.SAMPLER or self._pause_s <= self._heartbeat_interval_s:
            return None
        return drawn_pause_s(self._pause_s, self._random())

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

    def _ask_verifiers(self) -> None:
        """Note which code grades, by the verifiers that are here."""
        present = {
            peer.node_id: self._graders[peer]
            for peer in self._few
            if peer.role is Role.VERIFIER and peer in self._graders and self._membership.is_here(peer)
        }
        self.accounts.grader = run_grader(
            self.accounts.grader, configured=self._configured_grader, verifiers=present
        )

    def _verdicts_for(self, peer: Peer, *, has_heard: bool) -> tuple[GroupVerdict, ...]:
        pending = self._pending.get(peer.node_id) if peer.role is Role.SAMPLER else None
        return () if pending is None else pending.take(VERDICTS_PER_HEARTBEAT, has_heard=has_heard)

    def _must_repair(self, held: PolicyVersion | None) -> bool:
        if held is None or not held.root:
            return False
        signed_root = self.accounts.versions.root_of(held.number)
        return signed_root is not None and signed_root != held.root
