"""MembershipService at the coordinator: translates between the wire and ``Peers`` and ``Spool``."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from heterorl.v1 import common_pb2, membership_pb2, membership_pb2_grpc
from node.clock import Clock
from node.coordinator.fleet.wait_chain import Facts, explained
from node.coordinator.peers import HeartbeatAnswer, HeartbeatReport, Peers
from node.coordinator.spool import Spool
from node.coordinator.work.agreement import DIGEST_BYTES
from node.coordinator.work.capacity import Capacity
from node.coordinator.work.decisions import room
from node.coordinator.work.model_check import Learner, check_base, check_chat_template, check_model
from node.coordinator.work.task_size import dispute
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.limits import LEASES_PER_PEER, METRIC_SAMPLES_PER_HEARTBEAT, STAMP_S
from node.policy import PolicyVersion
from node.protocol import OURS, check_common
from node.rpc.auth import Context, peer_of
from node.run import PeerQuery, Role, RunStatus, StepReport, Teaching
from node.wire.mapping import from_wire, member_from_wire, optional_from_wire, to_wire
from node.wire.members import (
    base_model_from_wire,
    check_owners,
    metric_families_from_wire,
    spoken_from_wire,
)

logger = logging.getLogger(__name__)

_INSTANCE_CHARACTERS: Final = 64

_SUMMARY_CHARACTERS: Final = 200

BAD_PROMPTS_SHOWN: Final = 50
"""Newest bad prompts in the state of the run; it says how many there are, too."""

LARGE_FLEET_PEERS: Final = 50
SHARED_STATUS_S: Final = 0.5
"""In a large fleet, all who ask for the first page within so long get the same: with 200 peers it takes 10 ms
to make, and every member may ask."""

_WAITS_FOR_CHARACTERS: Final = 100

_PROMPTS: Final = 1 << 40
"""As many as ``coordinator.prompts`` may be."""

CUT_NOTICE_S: Final = 0.2
"""Longer than gRPC takes to report a cut stream, shorter than a leaving peer waits for its answer."""


@dataclass(eq=False)
class MembershipServicer(membership_pb2_grpc.MembershipServiceServicer):
    """Admits peers, answers their heartbeats, returns the state of the run."""

    peers: Peers
    spool: Spool
    run_id: str
    settings: membership_pb2.JoinResponse
    """The head of the run is filled in for each answer."""
    revocations: RevocationList
    clock: Clock
    _streams: dict[Peer, object] = field(default_factory=dict)
    _shared_status: tuple[float, membership_pb2.GetStatusResponse] | None = None
    _started_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at_s = self.clock.now()

    async def Join(  # noqa: N802 - the rpc's name
        self, request: membership_pb2.JoinRequest, context: Context
    ) -> membership_pb2.JoinResponse:
        """Admit a peer that has the run's model."""
        peer = peer_of(context)
        if request.run_id != self.run_id:
            raise RefusedError(
                Reason.FOREIGN_RUN,
                f"the peer is configured for run {request.run_id[:100]!r}, this is {self.run_id!r}",
                fix="check node.run_file",
            )
        speaks = spoken_from_wire(request)
        check_common(speaks, OURS, peer_name=f"{peer.role} {peer.node_id}")
        if (role := member_from_wire(Role, request, "role")) is not peer.role:
            raise RefusedError(
                Reason.WRONG_ROLE,
                f"{peer.node_id} joins as a {role}, its certificate is for a {peer.role}",
                fix="start it in the role that its token was made for, or enrol it again",
            )
        check_owners(request, peer.role)
        learner = self.spool.accounts.learner
        if peer.role is Role.LEARNER:
            await self.spool.admit_learner(_learner(peer, request))
        elif peer.role is Role.SAMPLER:
            if learner is not None:
                check_model(
                    request.layout_digest, request.tokenizer_digest, learner, layout_summary=_summary(request)
                )
                check_chat_template(request.chat_template_digest, learner)
                if (base := base_model_from_wire(request)).root:
                    check_base(base, learner)
            await self.spool.admit_sampler(peer.node_id, prompts=self._prompts(request))
        before = self.peers.instance(peer)
        with self._twins_noted(peer, context):
            member = self.peers.join(
                peer,
                _held(request),
                now=self.clock.now(),
                instance=request.instance[:_INSTANCE_CHARACTERS],
                completes=bool(request.prompts),
                grader_digest=self._grader_digest(request),
                speaks=speaks,
            )
        if peer.role is Role.SAMPLER and before not in ("", member.instance):
            await self.spool.end_leases(peer.node_id)
        logger.info(
            "peer joined",
            extra={
                "peer_role": peer.role,
                "node_id": peer.node_id,
                "joins": member.joins,
                **({"prompts": request.prompts} if request.prompts else {}),
                "software_version": speaks.software_version,
                "protocol": speaks.protocol,
            },
        )
        response = membership_pb2.JoinResponse()
        response.CopyFrom(self.settings)
        grader = self.spool.accounts.grader
        response.grader_digest, response.grader_said_by = grader.digest, grader.said_by
        if (head := self.peers.head) is not None:
            response.head.CopyFrom(to_wire(common_pb2.PolicyVersion, head))
        return response

    async def Heartbeat(  # noqa: N802 - the rpc's name
        self, request_iterator: AsyncIterator[membership_pb2.HeartbeatRequest], context: Context
    ) -> AsyncIterator[membership_pb2.HeartbeatResponse]:
        """Answer each heartbeat; a peer that ends its stream in good order leaves the run."""
        peer = peer_of(context)
        stream, has_heard = object(), False
        try:
            async for request in request_iterator:
                with self._twins_noted(peer, context):
                    answer = self._answer(peer, request, has_heard=has_heard)
                if not has_heard:
                    # Only now: a stream that is refused does not take the place of one that goes on.
                    self._streams[peer] = stream
                yield answer
                has_heard = True
            self._disconnected(peer, stream)
            # To gRPC a stream that was cut ends like any other; it cancels this task a moment later.
            await asyncio.sleep(CUT_NOTICE_S)
            # A peer that came back after a cut has a newer stream by now.
            if self._streams.get(peer) is stream:
                self.peers.leave(peer)
                logger.info("peer left", extra={"peer_role": peer.role, "node_id": peer.node_id})
        finally:
            self._disconnected(peer, stream)
            if self._streams.get(peer) is stream:
                del self._streams[peer]

    async def GetStatus(  # noqa: N802 - the rpc's name
        self, request: membership_pb2.GetStatusRequest, context: Context
    ) -> membership_pb2.GetStatusResponse:
        now = self.clock.now()
        if request.HasField("query"):
            return to_wire(membership_pb2.GetStatusResponse, self.status(from_wire(PeerQuery, request.query)))
        if self._shared_status is not None and 0 <= now - self._shared_status[0] < SHARED_STATUS_S:
            return self._shared_status[1]
        answer = to_wire(membership_pb2.GetStatusResponse, self.status(PeerQuery()))
        self._shared_status = (now, answer) if len(answer.peers) >= LARGE_FLEET_PEERS else None
        return answer

    def status(self, query: PeerQuery) -> RunStatus:
        """Return the state of the run, with a page of its peers."""
        accounts, capacity, now = self.spool.accounts, room(self.spool.accounts), self.clock.now()
        learner = accounts.learner
        rows, matching = self.peers.page(query, now)
        survey = self.peers.survey
        headline, waits = explained(self._facts(capacity, now), self.peers.waiting_samplers(now))
        return RunStatus(
            run_id=self.run_id,
            head=self.peers.head,
            learner_epoch=0 if learner is None else learner.epoch,
            peers=tuple(map(self.spool.held_back.shown, rows)),
            matching_peers=matching,
            peer_counts=survey.peer_counts,
            headline=headline,
            waits=waits,
            unusual=survey.unusual,
            slots={state.value: n for state, n in accounts.slots.counts().items()},
            verdicts={verdict.value: n for verdict, n in accounts.verdicts().items()},
            step=self.peers.step,
            teaching=self.peers.teaching,
            batch_groups=self.settings.batch_groups,
            capacity_groups=capacity.groups,
            capacity_bound=capacity.bound,
            now_s=now,
            ledger_gap=accounts.gap,
            prompts=accounts.prompts or 0,
            bad_prompts=accounts.bad_prompts.newest(BAD_PROMPTS_SHOWN),
            bad_prompts_total=len(accounts.bad_prompts),
            evaluation=accounts.evaluations.status,
            bad_prompt_reasons=accounts.bad_prompts.reasons(),
            max_staleness_versions=self.settings.max_staleness_versions,
            grader_digest=accounts.grader.digest,
            grader_said_by=accounts.grader.said_by,
            task_dispute=dispute(accounts.task, accounts.size_words),
            exportable_best=self.peers.exportable_best,
        )

    def _facts(self, capacity: Capacity, now: float) -> Facts:
        accounts, peers, head = self.spool.accounts, self.peers, self.peers.head
        started_for_s = max(0.0, now - self._started_at_s)
        announced_for_s = None if head is None else accounts.versions.age_s(head.number, now=now)
        load, pause = accounts.load(), self.spool.held_back.pause
        return Facts(
            paused="" if pause is None else str(pause),
            paused_s=0.0 if pause is None else pause.for_s(now),
            version=None if head is None else head.number,
            version_for_s=started_for_s if announced_for_s is None else announced_for_s,
            started_for_s=started_for_s,
            ledger_gap=accounts.gap,
            is_confirmed=accounts.is_confirmed,
            is_task_known=accounts.slots.prompts is not None,
            live_learners=peers.live(Role.LEARNER),
            learner_unheard_s=peers.unheard_s(Role.LEARNER, now),
            learner_waits_for=peers.learner_waits_for(),
            learner_waits_s=peers.learner_waits_s(now),
            live_samplers=peers.live(Role.SAMPLER),
            sampler_unheard_s=peers.unheard_s(Role.SAMPLER, now),
            idle_s=0.0 if peers.teaching is None else peers.teaching.idle_s,
            capacity_groups=capacity.groups,
            capacity_bound=capacity.bound,
            ready_groups=load.untrained_groups,
            batch_groups=self.settings.batch_groups,
        )

    def _prompts(self, request: membership_pb2.JoinRequest) -> int:
        """Return the prompts that a sampler found; 0: it does not know, or the coordinator has the rows."""
        if not 0 <= request.prompts <= _PROMPTS:
            raise RefusedError(
                Reason.MALFORMED, f"a task of {request.prompts} prompts, allowed are 1 to {_PROMPTS}"
            )
        return 0 if self.settings.prompts or self._is_of_before(request) else request.prompts

    def _grader_digest(self, request: membership_pb2.JoinRequest) -> bytes:
        if len(request.grader_digest) not in (0, DIGEST_BYTES):
            raise RefusedError(Reason.MALFORMED, f"a grader digest of {len(request.grader_digest)} bytes")
        return b"" if self._is_of_before(request) else request.grader_digest

    def _is_of_before(self, request: membership_pb2.JoinRequest) -> bool:
        """Whether a sampler speaks of the task as it was before this coordinator was configured otherwise."""
        return request.task_digest not in (b"", self.settings.task_digest)

    def _disconnected(self, peer: Peer, stream: object) -> None:
        if self._streams.get(peer) is stream:
            self.peers.disconnected(peer)

    def _answer(
        self, peer: Peer, request: membership_pb2.HeartbeatRequest, *, has_heard: bool
    ) -> membership_pb2.HeartbeatResponse:
        received_at_s = self.clock.now()
        self._check_not_fenced(peer)
        check_owners(request, peer.role)
        if not abs(request.clock_offset_s) <= STAMP_S:  # neither is NaN
            raise RefusedError(
                Reason.MALFORMED,
                f"a clock offset of {request.clock_offset_s} s",
                fix=f"set the clock of {peer.node_id}",
            )
        if len(request.running_lease_ids) > LEASES_PER_PEER:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a heartbeat names {len(request.running_lease_ids)} leases, allowed are {LEASES_PER_PEER}",
            )
        if len(request.metric_values) > METRIC_SAMPLES_PER_HEARTBEAT:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a heartbeat with {len(request.metric_values)} values of metrics, allowed are "
                f"{METRIC_SAMPLES_PER_HEARTBEAT}",
            )
        heartbeat = HeartbeatReport(
            held=_held(request),
            clock_offset_s=request.clock_offset_s,
            waits_for=request.waits_for[:_WAITS_FOR_CHARACTERS],
            step=optional_from_wire(StepReport, request, "step"),
            teaching=optional_from_wire(Teaching, request, "teaching"),
            has_heard=has_heard,
            instance=request.instance[:_INSTANCE_CHARACTERS],
            best_version=request.best_version if request.HasField("best_version") else None,
        )
        answer = self.peers.heartbeat(
            peer,
            heartbeat,
            now=received_at_s,
            metrics=metric_families_from_wire(request.metrics) if request.metrics else (),
            metric_values=request.metric_values,
        )
        leases = tuple(request.running_lease_ids)
        lost = self.spool.renew(peer.node_id, leases) if leases else ()
        return self._response(peer, request, answer, lost, received_at_s=received_at_s)

    def _response(
        self,
        peer: Peer,
        request: membership_pb2.HeartbeatRequest,
        answer: HeartbeatAnswer,
        lost: tuple[str, ...],
        *,
        received_at_s: float,
    ) -> membership_pb2.HeartbeatResponse:
        """Return the answer as a message; written out, since a large fleet makes thousands a second."""
        head = answer.head
        return membership_pb2.HeartbeatResponse(
            sequence=request.sequence,
            received_at_s=received_at_s,
            head=None if head is None else common_pb2.PolicyVersion(number=head.number, root=head.root),
            lost_lease_ids=lost,
            verdicts=[to_wire(membership_pb2.GroupVerdict, one) for one in answer.verdicts],
            must_repair=answer.must_repair,
            metrics_every_s=answer.metrics_every_s,
            wants_whole_metrics=answer.wants_whole_metrics,
            next_heartbeat_s=answer.next_heartbeat_s,
            longest_lag_versions=answer.longest_lag_versions,
            best_version=answer.best_version,
            evaluating_version=answer.evaluating_version,
            is_evaluated=answer.is_evaluated,
            revocations=self._revocations_for(peer, request.revocations_digest),
            sent_at_s=self.clock.now(),
        )

    def _revocations_for(self, peer: Peer, digest: bytes) -> membership_pb2.Revocations | None:
        if peer.role is not Role.RELAY:
            return None
        current = self.revocations.current()
        return None if digest == current.digest else to_wire(membership_pb2.Revocations, current)

    @contextmanager
    def _twins_noted(self, peer: Peer, context: Context) -> Iterator[None]:
        try:
            yield
        except RefusedError as refused:
            if refused.reason is Reason.NAME_IN_USE:
                self.peers.count_twin()
                about = {"peer_role": peer.role, "node_id": peer.node_id, "refused": context.peer()}
                logger.warning("two processes use one name", extra={**about, "detail": str(refused)})
            raise

    def _check_not_fenced(self, peer: Peer) -> None:
        learner = self.spool.accounts.learner
        if peer.role is Role.LEARNER and learner is not None and learner.node_id != peer.node_id:
            raise RefusedError(
                Reason.FENCED,
                f"learner {learner.node_id} has taken over with epoch {learner.epoch}",
                fix="stop one of them; a run has one learner",
            )


def _learner(peer: Peer, request: membership_pb2.JoinRequest) -> Learner:
    base = base_model_from_wire(request)
    return from_wire(
        Learner,
        request,
        node_id=peer.node_id,
        epoch=request.learner_epoch,
        version=request.held.number,
        base_root=base.root,
        base_parts=base.parts,
        layout_summary=_summary(request),
        context_tokens=max(0, request.context_tokens),
    )


def _summary(request: membership_pb2.JoinRequest) -> str:
    return "".join(filter(str.isprintable, request.layout_summary))[:_SUMMARY_CHARACTERS]


def _held(request: membership_pb2.JoinRequest | membership_pb2.HeartbeatRequest) -> PolicyVersion | None:
    return _version(request.held.number, request.held.root) if request.HasField("held") else None


@functools.lru_cache(maxsize=1024)
def _version(number: int, root: bytes) -> PolicyVersion:
    """Return a version that peers hold: checked once, and one object for all that hold it."""
    return from_wire(PolicyVersion, common_pb2.PolicyVersion(number=number, root=root))
