"""The peers of a run: who is here, what each holds and waits for, and which verdicts it has not heard.

Nothing here outlives the process, because peers report it all again when they join. A peer that is silent for
GONE_AFTER_S counts as one that left. Past PEERS_REMEMBERED, those that left first are forgotten: row, lag,
numbers and pending verdicts.

A sampler's heartbeat or join costs the same however many peers there are. ``expire`` and the learner's
heartbeat look at all of them, with little work for each.
"""

import random as randomness
from collections.abc import Callable, Iterator
from typing import Final

from node.coordinator.fleet.heartbeats import UnheardVerdicts, drawn_pause_s, pause_s, silence_s
from node.coordinator.fleet.membership import KnownPeer, Membership, PeerState
from node.coordinator.fleet.peer_reports import (
    HeartbeatAnswer,
    HeartbeatReport,
    Joining,
    LearnerNews,
    LearnerReport,
    Reported,
)
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.terms.model_check import SamplerModel, VerifierModel
from node.coordinator.work.terms.run_terms import UNSAID, run_grader
from node.identity.peer import Peer
from node.values.groups.verdict import GroupVerdict
from node.values.limits import VERDICTS_PER_HEARTBEAT
from node.values.policy import PolicyVersion
from node.values.run import Role, StepReport, Teaching

PENDING_VERDICTS: Final = 4 * VERDICTS_PER_HEARTBEAT
"""Verdicts kept for a sampler that does not heartbeat; then the oldest go. The ledger counts them all."""


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
        self._known: dict[Peer, Reported] = {}
        self._few: dict[Peer, None] = {}
        """Known peers that are no samplers."""
        self._samplers: set[str] = set()
        """Node ids of known samplers."""
        self._configured_grader = grader_digest
        accounts.grader = run_grader(UNSAID, configured=grader_digest, verifiers={})
        self._unheard = UnheardVerdicts(capacity=PENDING_VERDICTS)
        self.step: StepReport | None = None
        self.teaching: Teaching | None = None

    @property
    def head(self) -> PolicyVersion | None:
        """The newest announced version; None before the first."""
        return self._head()

    def join(self, peer: Peer, joining: Joining, *, now: float) -> KnownPeer:
        """Admit a peer, or admit it again; see ``Membership.join``."""
        member = self._membership.join(peer, now, instance=joining.instance, completes=joining.completes)
        report = HeartbeatReport(joining.held)
        known = self._known.get(peer)
        if known is None:
            known = self._known[peer] = Reported(report, now, joining.speaks)
            if peer.role is Role.SAMPLER:
                self._samplers.add(peer.node_id)
            else:
                self._few[peer] = None
        known.report, known.waits_since_s, known.speaks = report, now, joining.speaks
        if isinstance(joining.model, (SamplerModel, VerifierModel)):
            known.unchecked = None if self._is_model_known() else joining.model
        if isinstance(joining.model, SamplerModel) and joining.model.base.root:
            known.said_base = joining.instance
        if joining.grader_digest:
            known.grader = joining.grader_digest
            if peer.role is Role.VERIFIER:
                self._ask_verifiers()
        return member

    def instance(self, peer: Peer) -> str:
        return self._membership.instance(peer)

    def check_model(self, peer: Peer) -> None:
        """Check a peer that joined before the learner. Raises RefusedError: in what its model differs."""
        known, learner = self._known.get(peer), self.accounts.learner
        if known is not None and known.unchecked is not None and learner is not None:
            known.unchecked.check(learner)
            if self._is_model_known():
                known.unchecked = None

    def lacks_for_leases(self, peer: Peer) -> str:
        """Return what a sampler lacks without which it is leased nothing; empty: nothing."""
        learner, has_said_base = self.accounts.learner, self._known[peer].said_base == self.instance(peer)
        if learner is not None and learner.base_root and not has_said_base:
            return "base model"
        return "grader" if self.objection_to_grader(peer) else ""

    def objection_to_grader(self, peer: Peer) -> str:
        """Return how a peer's grader code differs from the run's; empty where it does not."""
        work, digest = self.accounts.work, self._known[peer].grader
        is_sampler = peer.role is Role.SAMPLER
        return work.objection_to_grader(digest) if is_sampler else work.grader.objection(digest)

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
        self._known[peer].note(heartbeat, now)
        if (learner := heartbeat.learner) is not None:
            self.step, self.teaching = learner.step or self.step, learner.teaching or self.teaching
            self.accounts.version_groups = learner.version_groups
        return HeartbeatAnswer(
            self.head,
            self._verdicts_for(peer, has_heard=heartbeat.has_heard),
            self._must_repair(heartbeat.held),
            self._next_heartbeat_s(peer),
            None if learner is None else self._learner_news(),
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
        return peer in self._known

    def of(self, peer: Peer) -> Reported:
        """Return what a known peer has said of itself."""
        return self._known[peer]

    def live(self, role: Role) -> int:
        """Return how many peers of the role are in the run and not silent."""
        counts = self._membership.counts
        return sum(counts.get((role, state), 0) for state in (PeerState.JOINED, PeerState.LIVE))

    @property
    def learner(self) -> Peer | None:
        """The learner known for the longest; None: there is none."""
        return next((peer for peer in self._few if peer.role is Role.LEARNER), None)

    def learners(self) -> Iterator[tuple[Peer, LearnerReport]]:
        """Yield the learners that have sent a heartbeat since they joined, with their newest reports."""
        reports = ((peer, self._known[peer].report.learner) for peer in self._few)
        return ((peer, report) for peer, report in reports if report is not None)

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
        self._metrics.dropped_verdicts.inc(self._unheard.put(sampler_id, verdict))

    def expire(self, now: float) -> tuple[KnownPeer, ...]:
        """Note who has fallen silent, drop what was kept for those that left; return who changed."""
        self._pause_s = pause_s(
            interval_s=self._heartbeat_interval_s,
            peers=self._membership.present_peers,
            lease_ttl_s=self.accounts.terms.lease_ttl_s,
        )
        self._membership.be_patient(silence_s(configured_s=self._silent_after_s, pause_s=self._pause_s))
        changed = self._membership.expire(now)
        if len(self._known) > len(self._membership):
            self._forget()
        if any(member.peer.role is Role.VERIFIER for member in changed):
            self._ask_verifiers()
        self._metrics.dropped_verdicts.inc(self._unheard.keep_only(self._samplers))
        self._metrics.heartbeat_pause.set(self._pause_s)
        return changed

    def _forget(self) -> None:
        for peer in [peer for peer in self._known if peer not in self._membership]:
            del self._known[peer]
            self._few.pop(peer, None)
            if peer.role is Role.SAMPLER:
                self._samplers.discard(peer.node_id)

    def _is_model_known(self) -> bool:
        """Whether the learner has said all there is to say of the run's model."""
        return self.accounts.learner is not None and bool(self.accounts.learner.text_digest)

    def _next_heartbeat_s(self, peer: Peer) -> float | None:
        """Return when a peer is to send its next heartbeat; None: after the configured interval."""
        if peer.role is not Role.SAMPLER or self._pause_s <= self._heartbeat_interval_s:
            return None
        return drawn_pause_s(self._pause_s, self._random())

    def _learner_news(self) -> LearnerNews:
        evaluations = self.accounts.evaluations
        best, head = evaluations.status.best, 0 if self.head is None else self.head.number
        return LearnerNews(
            longest_lag_versions=self._longest_lag(),
            best_version=None if best is None else best.version,
            evaluating_version=evaluations.awaited_version(head),
            is_evaluated=evaluations.is_configured,
        )

    def _longest_lag(self) -> int:
        """Return the versions to the head of the sampler furthest behind that holds more than the base."""
        head = 0 if self.head is None else self.head.number
        held = (
            self._known[member.peer].report.held
            for member in self._membership.members
            if member.peer.role is Role.SAMPLER and member.state is not PeerState.LEFT
        )
        return max(
            (head - one.number for one in held if one is not None and 0 < one.number < head), default=0
        )

    def _ask_verifiers(self) -> None:
        """Note which code grades, by the verifiers that are here."""
        present = {
            peer.node_id: digest
            for peer in self._few
            if peer.role is Role.VERIFIER
            and self._membership.is_here(peer)
            and (digest := self._known[peer].grader)
        }
        self.accounts.grader = run_grader(
            self.accounts.grader, configured=self._configured_grader, verifiers=present
        )

    def _verdicts_for(self, peer: Peer, *, has_heard: bool) -> tuple[GroupVerdict, ...]:
        if peer.role is not Role.SAMPLER:
            return ()
        return self._unheard.take(peer.node_id, VERDICTS_PER_HEARTBEAT, has_heard=has_heard)

    def _must_repair(self, held: PolicyVersion | None) -> bool:
        if held is None or not held.root:
            return False
        signed_root = self.accounts.versions.root_of(held.number)
        return signed_root is not None and signed_root != held.root
