"""The coordinator's one door: a peer's request is checked, decided, made durable, answered.

    parse (servicers) --> check (here) --> decide (``work``, pure) --> on disk (``RunLedger``) --> answer

What is checked before a decision, in this order:

    join        the run's model and task --> whose process holds the name --> leases of another one end
    heartbeat   no learner has taken over --> in the run, and the process that joined --> its leases renewed
    lease       joined --> its model is the run's --> it said which base model --> its grader is the run's
                --> no operator holds it back
    submit      not revoked since its stream began
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from node.coordinator.data.rows import Rows
from node.coordinator.fleet.membership import KnownPeer
from node.coordinator.fleet.peer_reports import HeartbeatAnswer, HeartbeatReport, Joining
from node.coordinator.peers.peers import Peers
from node.coordinator.streams.learner_stream import LearnerStreams
from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.decisions import leasing
from node.coordinator.work.decisions.decision import Decide
from node.coordinator.work.decisions.leasing import EMPTY_PAUSE_S, LeaseRequest, ReturnedLeases
from node.coordinator.work.decisions.submitted_groups import Submission, Submitted, submission
from node.coordinator.work.terms.model_check import Learner, check_prompts
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.system.clock import Clock
from node.values.groups.rollout import LeaseGrant, PromptLease
from node.values.groups.verdict import Verdict
from node.values.limits import LEASED_ROWS_BYTES
from node.values.roles import Role

logger = logging.getLogger(__name__)

HELD_BACK_RETRY_S: Final = 1.0
"""How soon a sampler asks again that an operator holds back: how late it may notice that this has ended."""


@dataclass(slots=True)
class Door:
    """Used on the event loop's thread."""

    ledger: RunLedger
    peers: Peers
    learners: LearnerStreams
    revocations: RevocationList
    clock: Clock
    rows: Rows | None = None

    async def close(self) -> None:
        """Close what requests are answered from, once nobody asks."""
        await self.ledger.close()
        if self.rows is not None:
            self.rows.close()

    async def join(self, peer: Peer, joining: Joining) -> KnownPeer:
        """Admit a peer that has the run's model. Raises RefusedError: why not."""
        accounts = self.ledger.accounts
        if isinstance(joining.model, Learner):
            await self.learners.admit(joining.model)
        elif joining.model is not None and accounts.learner is not None:
            joining.model.check(accounts.learner)
        if joining.prompts:
            terms = accounts.terms
            check_prompts(joining.prompts, runs=terms.prompts, task=terms.work.task, sampler_id=peer.node_id)
        before = self.peers.instance(peer)
        member = self.peers.join(peer, joining, now=self.clock.now())
        if peer.role is Role.SAMPLER and before not in ("", member.instance):
            # The process that took them is gone.
            accounts.slots.cut_short(peer.node_id, now=self.clock.now())
            await self.ledger.decide(leasing.expiry)
        return member

    def heartbeat(
        self, peer: Peer, report: HeartbeatReport, lease_ids: tuple[str, ...]
    ) -> tuple[HeartbeatAnswer, tuple[str, ...]]:
        """Note a heartbeat and renew leases; return the answer, and those leases whose work is in vain.

        Raises RefusedError: NOT_JOINED; NAME_IN_USE; FENCED.
        """
        accounts, now = self.ledger.accounts, self.clock.now()
        learner = accounts.learner
        if peer.role is Role.LEARNER and learner is not None and learner.node_id != peer.node_id:
            raise RefusedError(
                Reason.FENCED,
                f"learner {learner.node_id} has taken over with epoch {learner.epoch}",
                fix="stop one of them; a run has one learner",
            )
        answer = self.peers.heartbeat(peer, report, now=now)
        return answer, accounts.renew(peer.node_id, lease_ids, now=now) if lease_ids else ()

    async def lease(self, peer: Peer, request: LeaseRequest) -> LeaseGrant:
        """Lease prompts to a sampler; if it goes away before it hears of them, they are leased to the next.

        Raises:
            RefusedError: NOT_JOINED; in what its model differs; DISK; a row cannot be read. Nothing was
                leased.
        """
        self.peers.check_present(peer)
        self.peers.check_model(peer)
        if waits_for := self.peers.lacks_for_leases(peer):
            grant = LeaseGrant((), EMPTY_PAUSE_S, waits_for)
        elif waits_for := self.ledger.accounts.orders.held_back(peer.node_id):
            grant = LeaseGrant((), HELD_BACK_RETRY_S, waits_for)
        else:
            grant = await self._granted(request)
        if grant.leases:
            return await self._with_rows(request, grant)
        return replace(grant, retry_after_s=self.peers.lease_pause_s(grant.retry_after_s))

    def submit(self, request: Submission) -> Awaitable[Submitted]:
        """Accept a group, or return why not; what is SPOOLED is on disk. It is under way without a task.

        Raises, here or where it is awaited:
            RefusedError: BUSY where the spool is full, DISK where it cannot be written.
        """
        sampler_id = request.encoded.sampler_id
        if self.revocations.is_revoked(sampler_id):
            shut_out: asyncio.Future[Submitted] = asyncio.get_running_loop().create_future()
            shut_out.set_result(Submitted(Verdict.FOREIGN, f"{sampler_id} was revoked"))
            return shut_out
        return self.ledger.promise(partial(submission, request=request), caller=sampler_id)

    async def _granted(self, request: LeaseRequest) -> LeaseGrant:
        held, evaluations = request.held, self.ledger.accounts.evaluations
        if request.stays and held is not None and evaluations.is_due(held.number):
            begins = partial(leasing.evaluation_begins, request=held)
            await self.ledger.decide(begins, caller=request.sampler_id)
        if self.rows is not None:
            most = max(1, LEASED_ROWS_BYTES // self.rows.longest_bytes)
            request = replace(request, wanted=min(request.wanted, most))
        return await self.ledger.decide(
            partial(leasing.lease, request=request),
            caller=request.sampler_id,
            undo=partial(_taken_back, request.sampler_id),
        )

    async def _with_rows(self, request: LeaseRequest, grant: LeaseGrant) -> LeaseGrant:
        """Return a grant with the rows of its prompts; where one cannot be read, nothing is leased."""
        if self.rows is None:
            return grant
        try:
            leases = await asyncio.to_thread(_with_rows, grant.leases, self.rows)
        except (RefusedError, asyncio.CancelledError) as error:
            if isinstance(error, RefusedError):
                logger.error("row not read", extra={"detail": str(error)})
            self.ledger.decide_unheard(_taken_back(request.sampler_id, grant))
            raise
        return replace(grant, leases=leases)


def _taken_back(sampler_id: str, grant: LeaseGrant) -> Decide[Any] | None:
    """Return the decision that takes leases back of which their sampler was never told."""
    lease_ids = tuple(lease.lease_id for lease in grant.leases)
    return partial(leasing.release, request=ReturnedLeases(sampler_id, lease_ids)) if lease_ids else None


def _with_rows(leases: tuple[PromptLease, ...], rows: Rows) -> tuple[PromptLease, ...]:
    return tuple(replace(lease, row=rows.row(lease.prompt_index)) for lease in leases)
