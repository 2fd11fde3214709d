"""The coordinator's answers to members: translates between the wire and ``PeerRequests``."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from heterorl.v1 import common_pb2, membership_pb2
from node.clock import Clock
from node.coordinator.peer_requests import Joining, PeerRequests
from node.coordinator.peers import HeartbeatAnswer, HeartbeatReport
from node.coordinator.run_status import RunReport
from node.coordinator.work.model_check import Learner, SamplerModel, StatedText, VerifierModel
from node.coordinator.work.task_check import DIGEST_BYTES
from node.enrolment.renewal import Renewal
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.limits import CHANGES_PER_HEARTBEAT, LEASES_PER_PEER, STAMP_S
from node.peer_figures import MachineFigures, SamplerFigures
from node.policy import PolicyVersion
from node.protocol import OURS, check_common
from node.run import PeerQuery, Role, StepReport, Teaching
from node.text_rules import SUMMARY_CHARACTERS
from node.wire.mapping import from_wire, member_from_wire, optional_from_wire, to_wire
from node.wire.members import (
    base_model_from_wire,
    check_owners,
    spoken_from_wire,
)

logger = logging.getLogger(__name__)

_INSTANCE_CHARACTERS: Final = 64

_SUMMARY_CHARACTERS: Final = 200

LARGE_FLEET_PEERS: Final = 50
SHARED_STATUS_S: Final = 0.5
"""In a large fleet, all who ask for the first page within so long get the same: with 200 peers it takes 10 ms
to make, and every member may ask."""

_WAITS_FOR_CHARACTERS: Final = 100

_CHANGE_CHARACTERS: Final = 200

_PROMPTS: Final = 1 << 40
"""As many as ``coordinator.prompts`` may be."""


@dataclass(eq=False)
class RunMembers:
    """Admits peers, answers their heartbeats, returns the state of the run."""

    requests: PeerRequests
    run: RunReport
    settings: membership_pb2.JoinResponse
    """The head of the run is filled in for each answer."""
    revocations: RevocationList
    clock: Clock
    renewal: Renewal
    move: Callable[[], bytes]
    """Returns the notice of where the coordinator will be; empty: it stays."""
    _told: tuple[bytes, set[Peer]] = field(default_factory=lambda: (b"", set()))
    """A notice of a move, and who has it."""
    _shared_status: tuple[float, membership_pb2.GetStatusResponse] | None = None

    async def join(
        self,
        peer: Peer,
        request: membership_pb2.JoinRequest,
        *,
        address: str,
        certificate: bytes,
    ) -> membership_pb2.JoinResponse:
        """Admit a peer that has the run's model."""
        if request.run_id != self.run.run_id:
            raise RefusedError(
                Reason.FOREIGN_RUN,
                f"the peer is configured for run {request.run_id[:100]!r}, this is {self.run.run_id!r}",
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
        joining = Joining(
            _held(request),
            model=_model(peer, request),
            instance=request.instance[:_INSTANCE_CHARACTERS],
            prompts=self._prompts(request),
            completes=bool(request.prompts),
            grader_digest=self._grader_digest(request),
            speaks=speaks,
        )
        try:
            member = await self.requests.join(peer, joining)
        except RefusedError as refused:
            self._note_twin(peer, address, refused)
            raise
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
        grader = self.requests.peers.accounts.grader
        response.grader_digest, response.grader_said_by = grader.digest, grader.said_by
        response.certificate = self.renewal.certificate_for(peer, certificate, protocol=speaks.protocol)
        response.moved = self._notice_for(peer, joins=True)
        if (head := self.requests.peers.head) is not None:
            response.head.CopyFrom(to_wire(common_pb2.PolicyVersion, head))
        return response

    def status(self, request: membership_pb2.GetStatusRequest) -> membership_pb2.GetStatusResponse:
        """Return the state of the run, with a page of its peers."""
        now = self.clock.now()
        if request.HasField("query"):
            query = from_wire(PeerQuery, request.query)
            return to_wire(membership_pb2.GetStatusResponse, self.run.status(query))
        if self._shared_status is not None and 0 <= now - self._shared_status[0] < SHARED_STATUS_S:
            return self._shared_status[1]
        answer = to_wire(membership_pb2.GetStatusResponse, self.run.status(PeerQuery()))
        self._shared_status = (now, answer) if len(answer.peers) >= LARGE_FLEET_PEERS else None
        return answer

    def disconnected(self, peer: Peer) -> None:
        """Note that a peer's stream ended, in whatever order."""
        self.requests.peers.disconnected(peer)

    def leave(self, peer: Peer) -> None:
        """Note that a peer left in good order."""
        self.requests.peers.leave(peer)

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

    def heartbeat(
        self, peer: Peer, request: membership_pb2.HeartbeatRequest, *, has_heard: bool, address: str
    ) -> membership_pb2.HeartbeatResponse:
        received_at_s = self.clock.now()
        report = self.report_in(peer, request, has_heard=has_heard)
        try:
            answer, lost = self.requests.heartbeat(peer, report, tuple(request.running_lease_ids))
        except RefusedError as refused:
            self._note_twin(peer, address, refused)
            raise
        return self._response(peer, request, answer, lost, received_at_s=received_at_s)

    def report_in(
        self, peer: Peer, request: membership_pb2.HeartbeatRequest, *, has_heard: bool
    ) -> HeartbeatReport:
        """Return what a heartbeat reports. Raises RefusedError: MALFORMED, OVER_LIMIT, WRONG_ROLE."""
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
        return HeartbeatReport(
            held=_held(request),
            clock_offset_s=request.clock_offset_s,
            waits_for=request.waits_for[:_WAITS_FOR_CHARACTERS],
            step=optional_from_wire(StepReport, request, "step"),
            teaching=optional_from_wire(Teaching, request, "teaching"),
            has_heard=has_heard,
            instance=request.instance[:_INSTANCE_CHARACTERS],
            best_version=request.best_version if request.HasField("best_version") else None,
            changes=tuple(text[:_CHANGE_CHARACTERS] for text in request.changes[:CHANGES_PER_HEARTBEAT]),
            machine=optional_from_wire(MachineFigures, request, "machine"),
            sampler=optional_from_wire(SamplerFigures, request, "sampler"),
        )

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
            next_heartbeat_s=answer.next_heartbeat_s,
            longest_lag_versions=answer.longest_lag_versions,
            best_version=answer.best_version,
            evaluating_version=answer.evaluating_version,
            is_evaluated=answer.is_evaluated,
            revocations=self._revocations_for(peer, request.revocations_digest),
            moved=self._notice_for(peer, joins=False),
            sent_at_s=self.clock.now(),
        )

    def _notice_for(self, peer: Peer, *, joins: bool) -> bytes:
        """Return the notice of a move for a peer that joins, or does not have it yet; else nothing.

        One whose answer is lost joins again.
        """
        notice = self.move()
        if notice != self._told[0]:
            self._told = notice, set()
        told = self._told[1]
        if not notice or (peer in told and not joins):
            return b""
        told.add(peer)
        return notice

    def _revocations_for(self, peer: Peer, digest: bytes) -> membership_pb2.Revocations | None:
        if peer.role is not Role.RELAY:
            return None
        current = self.revocations.current()
        return None if digest == current.digest else to_wire(membership_pb2.Revocations, current)

    def _note_twin(self, peer: Peer, address: str, refused: RefusedError) -> None:
        if refused.reason is Reason.NAME_IN_USE:
            self.requests.peers.count_twin()
            about = {"peer_role": peer.role, "node_id": peer.node_id, "refused": address}
            logger.warning("two processes use one name", extra={**about, "detail": str(refused)})


def _model(peer: Peer, request: membership_pb2.JoinRequest) -> Learner | SamplerModel | VerifierModel | None:
    if peer.role is Role.VERIFIER:
        return VerifierModel(_text(request))
    if peer.role is Role.RELAY:
        return None
    base = base_model_from_wire(request)
    if peer.role is Role.SAMPLER:
        return SamplerModel(request.layout_digest, _text(request), base, layout_summary=_summary(request))
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
        text_summary=_text(request).text_summary,
    )


def _text(request: membership_pb2.JoinRequest) -> StatedText:
    lines = request.text_summary[:SUMMARY_CHARACTERS].split("\n")
    return StatedText(
        request.tokenizer_digest,
        request.chat_template_digest,
        request.text_digest,
        "\n".join("".join(one for one in line if one == "\t" or one.isprintable()) for line in lines),
    )


def _summary(request: membership_pb2.JoinRequest) -> str:
    return "".join(filter(str.isprintable, request.layout_summary))[:_SUMMARY_CHARACTERS]


def _held(request: membership_pb2.JoinRequest | membership_pb2.HeartbeatRequest) -> PolicyVersion | None:
    return _version(request.held.number, request.held.root) if request.HasField("held") else None


@functools.lru_cache(maxsize=1024)
def _version(number: int, root: bytes) -> PolicyVersion:
    """Return a version that peers hold: checked once, and one object for all that hold it."""
    return from_wire(PolicyVersion, common_pb2.PolicyVersion(number=number, root=root))
