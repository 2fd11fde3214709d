"""Messages of joining peers and heartbeats, checked and made values of; and the answer to a heartbeat."""

import functools
from typing import Final

from heterorl.v1 import common_pb2, membership_pb2
from node.coordinator.fleet.peer_reports import HeartbeatAnswer, HeartbeatReport, Joining, LearnerReport
from node.coordinator.work.terms.model_check import Learner, SamplerModel, StatedText, VerifierModel
from node.coordinator.work.terms.run_terms import DIGEST_BYTES
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.text.text_rules import SUMMARY_CHARACTERS
from node.values.limits import CHANGES_PER_HEARTBEAT, LEASES_PER_PEER, STAMP_S
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import PolicyVersion
from node.values.protocol import OURS, check_common
from node.values.run import Role, StepReport, Teaching
from node.wire.mapping import from_wire, member_from_wire, optional_from_wire, to_wire
from node.wire.members import base_model_from_wire, check_owners, spoken_from_wire

_INSTANCE_CHARACTERS: Final = 64
_LAYOUT_CHARACTERS: Final = 200
_WAITS_FOR_CHARACTERS: Final = 100
_CHANGE_CHARACTERS: Final = 200

_PROMPTS: Final = 1 << 40
"""As many as ``coordinator.prompts`` may be."""


def joining_from_wire(
    peer: Peer, request: membership_pb2.JoinRequest, *, run_id: str, run: membership_pb2.JoinResponse
) -> Joining:
    """Return a request to join.

    Args:
        run: What the run tells those that join: its task, and how many prompts where it has the rows.
    Raises:
        RefusedError: FOREIGN_RUN; PROTOCOL_MISMATCH; WRONG_ROLE; MALFORMED.
    """
    if request.run_id != run_id:
        raise RefusedError(
            Reason.FOREIGN_RUN,
            f"the peer is configured for run {request.run_id[:100]!r}, this is {run_id!r}",
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
    if not 0 <= request.prompts <= _PROMPTS:
        raise RefusedError(
            Reason.MALFORMED, f"a task of {request.prompts} prompts, allowed are 1 to {_PROMPTS}"
        )
    if len(request.grader_digest) not in (0, DIGEST_BYTES):
        raise RefusedError(Reason.MALFORMED, f"a grader digest of {len(request.grader_digest)} bytes")
    # Whether it speaks of the task as it was before this coordinator was configured otherwise.
    is_of_before = request.task_digest not in (b"", run.task_digest)
    return Joining(
        _held(request),
        model=_model(peer, request),
        instance=request.instance[:_INSTANCE_CHARACTERS],
        prompts=0 if run.prompts or is_of_before else request.prompts,
        completes=bool(request.prompts),
        grader_digest=b"" if is_of_before else request.grader_digest,
        speaks=speaks,
    )


def report_from_wire(
    peer: Peer, request: membership_pb2.HeartbeatRequest, *, has_heard: bool
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
        has_heard=has_heard,
        instance=request.instance[:_INSTANCE_CHARACTERS],
        machine=optional_from_wire(MachineFigures, request, "machine"),
        sampler=optional_from_wire(SamplerFigures, request, "sampler"),
        learner=_learner_report(request) if peer.role is Role.LEARNER else None,
    )


def heartbeat_response(
    answer: HeartbeatAnswer,
    *,
    sequence: int,
    received_at_s: float,
    sent_at_s: float,
    lost_lease_ids: tuple[str, ...],
    revocations: membership_pb2.Revocations | None,
    moved: bytes,
) -> membership_pb2.HeartbeatResponse:
    """Return the answer as a message; written out, since a large fleet makes thousands a second."""
    head = answer.head
    response = membership_pb2.HeartbeatResponse(
        sequence=sequence,
        received_at_s=received_at_s,
        sent_at_s=sent_at_s,
        head=None if head is None else common_pb2.PolicyVersion(number=head.number, root=head.root),
        lost_lease_ids=lost_lease_ids,
        verdicts=[to_wire(membership_pb2.GroupVerdict, one) for one in answer.verdicts],
        must_repair=answer.must_repair,
        next_heartbeat_s=answer.next_heartbeat_s,
        revocations=revocations,
        moved=moved,
    )
    if answer.learner is not None:
        response.MergeFrom(to_wire(membership_pb2.HeartbeatResponse, answer.learner))
    return response


def _learner_report(request: membership_pb2.HeartbeatRequest) -> LearnerReport:
    return LearnerReport(
        step=optional_from_wire(StepReport, request, "step"),
        teaching=optional_from_wire(Teaching, request, "teaching"),
        best_version=request.best_version if request.HasField("best_version") else None,
        changes=tuple(text[:_CHANGE_CHARACTERS] for text in request.changes[:CHANGES_PER_HEARTBEAT]),
        version_groups=request.version_groups,
    )


def _model(peer: Peer, request: membership_pb2.JoinRequest) -> Learner | SamplerModel | VerifierModel | None:
    if peer.role is Role.VERIFIER:
        return VerifierModel(_text(request))
    if peer.role is Role.RELAY:
        return None
    base = base_model_from_wire(request)
    if peer.role in (Role.SAMPLER, Role.CONTRIBUTOR):
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
    return "".join(filter(str.isprintable, request.layout_summary))[:_LAYOUT_CHARACTERS]


def _held(request: membership_pb2.JoinRequest | membership_pb2.HeartbeatRequest) -> PolicyVersion | None:
    return _version(request.held.number, request.held.root) if request.HasField("held") else None


@functools.lru_cache(maxsize=1024)
def _version(number: int, root: bytes) -> PolicyVersion:
    """Return a version that peers hold: checked once, and one object for all that hold it."""
    return from_wire(PolicyVersion, common_pb2.PolicyVersion(number=number, root=root))
