"""The state of a run: what it does, who waits for whom, what is counted, a page of its peers; reads only.

Rpcs ask ``RunReport``. Threads of the telemetry port ask ``LiveStatus``, which looks once on the event loop
that owns what it reads.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from node.coordinator.fleet.bottleneck import BottleneckWatch, Look
from node.coordinator.fleet.held_back import DELIVERY, NEWCOMERS, VERIFIERS, Cause
from node.coordinator.fleet.membership import PeerState
from node.coordinator.fleet.wait_chain import ROLLOUT_GROUPS, Facts, WaitingPeers, explained
from node.coordinator.peers.peer_table import PeerTable
from node.coordinator.peers.peers import Peers
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.capacity import Capacity
from node.coordinator.work.decisions.leasing import room
from node.coordinator.work.orders.orders import DRAINED, Orders
from node.page.run_sections import RunView, run_sections
from node.page.section import Section
from node.page.step_curves import StepCurves
from node.system.clock import Clock, moment
from node.telemetry.own_faults import OwnFault, OwnFaults
from node.text.wording import counted
from node.values.operator_order import DRAIN
from node.values.roles import Role
from node.values.run import PeerQuery, PeerStatus, RunStatus, SamplerStanding, StepReport, Unusual

BAD_PROMPTS_SHOWN: Final = 50
"""Newest bad prompts in the state of the run; it says how many there are, too."""

_WAITING_NAMED: Final = 3
"""Peers named of those that wait for the same."""

PEERS_SHOWN: Final = 50
STEPS_SHOWN: Final = 500

LOOK_S: Final = 2.0
"""Patience with an event loop that is busy, by one thread; others show the page before meanwhile."""


@dataclass(slots=True)
class RunReport:
    """Reports the state of one run."""

    run_id: str
    table: PeerTable
    faults: OwnFaults
    clock: Clock
    unusual_checks: Callable[[], tuple[Unusual, ...]] = tuple
    """Returns what is unusual about the checks of rewards."""
    pace: BottleneckWatch = field(default_factory=BottleneckWatch)
    """Told by ``look`` how the run goes."""
    _started_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at_s = self.clock.now()

    def look(self, now: float) -> None:
        """Look at what bounds the pace of the run; once a second, after the survey of its peers."""
        self.pace.look(self._look(now))

    def status(self, query: PeerQuery) -> RunStatus:
        """Return the state of the run, with a page of its peers.

        Raises RefusedError: MALFORMED; see ``PeerTable.page``.
        """
        accounts, capacity, now = self.table.peers.accounts, room(self.table.peers.accounts), self.clock.now()
        learner = accounts.learner
        rows, matching = self.table.page(query, now)
        survey, fault = self.table.survey, self.faults.first()
        unusual = (
            *survey.unusual,
            *self.unusual_checks(),
            *(Unusual(what, 1, ()) for what in accounts.orders.unusual(now)),
            *changes_of(self.table.peers),
        )
        if fault is not None:  # groups that are not taken in here are not held by their samplers' choice
            unusual = tuple(one for one in unusual if not one.what.endswith(SamplerStanding.HOARDS))
            rows = tuple(replace(row, standing_detail="") if _hoards(row) else row for row in rows)
        facts = self._facts(capacity, now, fault)
        by_role = (waiting_peers(self.table.peers, role, now) for role in (Role.SAMPLER, Role.CONTRIBUTOR))
        headline, waits = explained(facts, *by_role)
        return RunStatus(
            run_id=self.run_id,
            head=self.table.peers.head,
            learner_epoch=0 if learner is None else learner.epoch,
            peers=tuple(_shown(row, accounts.orders) for row in rows),
            matching_peers=matching,
            peer_counts=survey.peer_counts,
            headline=headline,
            bottleneck=self.pace.found,
            waits=waits,
            unusual=unusual,
            slots={state.value: n for state, n in accounts.slots.counts().items()},
            verdicts={verdict.value: n for verdict, n in accounts.tallies.total().items()},
            step=self.table.peers.step,
            teaching=self.table.peers.teaching,
            batch_groups=accounts.terms.bounds.batch_groups,
            capacity_groups=capacity.groups,
            capacity_bound=capacity.bound,
            now_s=now,
            ledger_gap=accounts.gap,
            prompts=accounts.terms.prompts,
            bad_prompts=accounts.bad_prompts.newest(BAD_PROMPTS_SHOWN),
            bad_prompts_total=len(accounts.bad_prompts),
            evaluation=accounts.evaluations.status,
            bad_prompt_reasons=accounts.bad_prompts.reasons(),
            max_staleness_versions=accounts.terms.bounds.max_staleness_versions,
            grader_digest=accounts.grader.digest,
            grader_said_by=accounts.grader.said_by,
            exportable_best=_exportable_best(self.table.peers),
            lines=accounts.single_facts.told(now),
        )

    def _look(self, now: float) -> Look | None:
        """Return a look at a run that goes on; None: it stands still, or its learner tells no waits."""
        accounts, step = self.table.peers.accounts, self.table.peers.step
        facts = self._facts(room(accounts), now, self.faults.first())
        if step is None or step.groups_wait_s is None or facts.stands_still:
            return None
        return Look(
            at_s=now,
            version=step.version,
            groups_wait_s=step.groups_wait_s,
            waiting_s=facts.learner_waits_s if facts.learner_waits_for == ROLLOUT_GROUPS else 0.0,
            samplers=self.table.survey.waits,
            contributors=self.table.survey.contributors,
            withheld_by=_withheld_by(facts, accounts),
            tightest_limit=facts.capacity_bound,
        )

    def _facts(self, capacity: Capacity, now: float, fault: OwnFault | None) -> Facts:
        accounts, peers = self.table.peers.accounts, self.table.peers
        head = peers.head
        started_for_s = max(0.0, now - self._started_at_s)
        announced_for_s = None if head is None else accounts.versions.age_s(head.number, now=now)
        learner, pause = peers.learner, accounts.orders.pause
        load, ungraded_since_s = accounts.load(), accounts.ungraded_since_s()
        return Facts(
            own_fault="" if fault is None else fault.what,
            own_fault_s=0.0 if fault is None else fault.for_s,
            own_fault_fix="" if fault is None else fault.fix,
            paused="" if pause is None else pause.origin,
            paused_s=0.0 if pause is None else pause.for_s(now),
            version=None if head is None else head.number,
            version_for_s=started_for_s if announced_for_s is None else announced_for_s,
            started_for_s=started_for_s,
            ledger_gap=accounts.gap,
            is_confirmed=accounts.is_confirmed,
            live_learners=peers.live(Role.LEARNER),
            learner_unheard_s=_unheard_s(peers, Role.LEARNER, now),
            learner_waits_for="" if learner is None else peers.of(learner).report.waits_for,
            learner_waits_s=self._learner_waits_s(now),
            live_samplers=peers.live(Role.SAMPLER),
            sampler_unheard_s=_unheard_s(peers, Role.SAMPLER, now),
            idle_s=0.0 if peers.teaching is None else peers.teaching.idle_s,
            capacity_groups=capacity.groups,
            capacity_bound=capacity.bound,
            ready_groups=load.untrained_groups - load.ungraded_groups,
            ungraded_groups=load.ungraded_groups,
            ungraded_s=0.0 if ungraded_since_s is None else max(0.0, now - ungraded_since_s),
            verifiers=peers.live(Role.VERIFIER),
            batch_groups=accounts.terms.bounds.batch_groups,
            lacks_verifier=accounts.reward_checks.lacks_verifier,
        )

    def _learner_waits_s(self, now: float) -> float:
        """Return how long the learner has named its wait; 0 where it is not here."""
        peers = self.table.peers
        return 0.0 if peers.learner is None else max(0.0, now - peers.of(peers.learner).waits_since_s)


def _withheld_by(facts: Facts, accounts: Accounts) -> Cause | None:
    """Return why a batch that is there does not get to the learner; None: none is there."""
    if len(accounts.slots.open.delivered()) >= facts.batch_groups:
        return DELIVERY
    if facts.ready_groups + facts.ungraded_groups < facts.batch_groups:
        return None
    if accounts.waiting_newcomers():
        return NEWCOMERS
    return VERIFIERS if facts.ungraded_groups or len(accounts.reward_checks) else None


def _shown(row: PeerStatus, orders: Orders) -> PeerStatus:
    """Return a row of the status: of a drained sampler that is here, with that state and why."""
    order = orders.of(DRAIN).get(row.node_id)
    if order is None or row.state not in (PeerState.JOINED, PeerState.LIVE):
        return row
    since = f" since {moment(order.at_s)}" if order.at_s else ""
    detail = f"drained{since} {order.origin}; it holds {counted(row.leases, 'lease')}"
    return replace(row, state=DRAINED, standing_detail=detail)


def _hoards(row: PeerStatus) -> bool:
    return row.standing == SamplerStanding.HOARDS


def _exportable_best(peers: Peers) -> int | None:
    """Return the best version as the learner has written it down; None: it has not, or is not there."""
    best = (report.best_version for _, report in peers.learners())
    return next((version for version in best if version is not None), None)


def changes_of(peers: Peers) -> tuple[Unusual, ...]:
    """Return the changes that operators made in the learner lately."""
    return tuple(
        Unusual(f"learner with {what}", 1, (peer.node_id,))
        for peer, report in peers.learners()
        for what in report.changes
    )


def _unheard_s(peers: Peers, role: Role, now: float) -> float | None:
    """Return the time since a peer of the role was last heard of; None: none ever was."""
    seen = [one.last_seen_s for one in peers.members if one.peer.role is role]
    return max(0.0, now - max(seen)) if seen else None


def waiting_peers(peers: Peers, role: Role, now: float) -> tuple[WaitingPeers, ...]:
    """Return the peers of a role that are here, by what they wait for."""
    by_wait: dict[str, list[tuple[float, str]]] = {}
    for member in peers.members:
        peer = member.peer
        if peer.role is role and member.state in (PeerState.JOINED, PeerState.LIVE):
            known = peers.of(peer)
            by_wait.setdefault(known.report.waits_for, []).append((known.waits_since_s, peer.node_id))
    return tuple(
        WaitingPeers(
            waits_for,
            tuple(name for _, name in heapq.nsmallest(_WAITING_NAMED, waits)),
            len(waits),
            max(0.0, now - min(waits)[0]),
        )
        for waits_for, waits in by_wait.items()
    )


class LiveStatus:
    """The state of one run, for the threads that render pages."""

    def __init__(self, report: RunReport, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare; ``loop`` is the one that ``report`` may be asked on."""
        self.report = report
        self._loop = loop
        self._steps: deque[StepReport] = deque(maxlen=STEPS_SHOWN)

    def note(self, step: StepReport | None) -> None:
        """Keep a step for the curves, unless it is known."""
        if step is not None and (not self._steps or self._steps[-1].version != step.version):
            self._steps.append(step)

    def sections(self) -> Iterator[Section]:
        """Return the sections. Any thread but the loop's.

        Raises TimeoutError: the event loop did not answer in LOOK_S.
        """
        look = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        try:
            status, steps = look.result(timeout=LOOK_S)
        finally:
            look.cancel()
        return run_sections(RunView.live(status, StepCurves.of_reports(steps)))

    async def _look(self) -> tuple[RunStatus, tuple[StepReport, ...]]:
        self.note(self.report.table.peers.step)
        return self.report.status(PeerQuery(sort_by="state", limit=PEERS_SHOWN)), tuple(self._steps)
