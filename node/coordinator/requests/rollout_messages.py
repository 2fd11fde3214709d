"""Messages about leases and groups, checked and made values of, and back."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from heterorl.v1 import orders_pb2, rollout_pb2
from node.coordinator.streams.learner_stream import OrdersTold, Quarantines, Said
from node.coordinator.work.decisions.leasing import LeaseRequest, ReturnedLeases
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.decisions.submitted_groups import Submission
from node.coordinator.work.decisions.trust import Quarantine
from node.coordinator.work.evaluation.held_out_score import answer_of
from node.errors import Reason, RefusedError
from node.identity.peer import Peer, is_name
from node.values.groups.failure import FailedLease, detail_of
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import GroupVerdict
from node.values.groups.well_formed import check_group
from node.values.limits import LEASES_PER_PEER, LEASES_PER_REQUEST, TRAINED_RUNS
from node.values.operator_order import OrderAnswer
from node.values.policy import PolicyVersion
from node.values.run import StepRecord
from node.wire.mapping import from_wire, optional_from_wire, to_wire
from node.wire.rollouts import delivery_to_wire, group_from_wire, header_from_wire

_DETAIL_CHARACTERS: Final = 1000

HELD_GROUPS: Final = 65_536
"""Groups a learner may hold: the largest buffer there is."""


def lease_request_from_wire(peer: Peer, request: rollout_pb2.LeasePromptsRequest) -> LeaseRequest:
    """Return what a sampler asks for. Raises RefusedError: MALFORMED."""
    if not 1 <= request.max_leases <= LEASES_PER_REQUEST:
        raise RefusedError(
            Reason.MALFORMED, f"max_leases = {request.max_leases}, allowed are 1 to {LEASES_PER_REQUEST}"
        )
    held = optional_from_wire(PolicyVersion, request, "held")
    return LeaseRequest(peer.node_id, request.max_leases, held, request.stays)


def returned_from_wire(peer: Peer, request: rollout_pb2.ReleaseLeasesRequest) -> ReturnedLeases:
    """Return the leases that a sampler gives back. Raises RefusedError: OVER_LIMIT; MALFORMED."""
    named = len(request.lease_ids) + len(request.failed)
    if named > LEASES_PER_PEER:
        raise RefusedError(
            Reason.OVER_LIMIT, f"{named} leases to release, at most {LEASES_PER_PEER} are allowed"
        )
    failed = tuple(from_wire(FailedLease, one, detail=detail_of(one.detail)) for one in request.failed)
    return ReturnedLeases(peer.node_id, tuple(request.lease_ids), failed)


def submission_of(group: EncodedGroup) -> Submission:
    """Return a group for training with its header, which is all that is read of it."""
    try:
        header = header_from_wire(group.header)
    except RefusedError as refused:
        return Submission(group, refused)
    if header.group_id != group.group_id:
        what = f"group {header.group_id[:100]!r} was submitted as {group.group_id[:100]!r}"
        return Submission(group, RefusedError(Reason.MALFORMED, what))
    return Submission(group, header)


def held_out_submission_of(group: EncodedGroup, *, vocabulary_size: int | None) -> Submission:
    """Return a held-out prompt's group with what it says. All of it is read, here alone: it goes no further.

    Blocks for a tenth of a second where the group is the largest there may be.
    """
    try:
        whole = group_from_wire(group)
        check_group(whole, vocabulary_size=vocabulary_size)
    except RefusedError as refused:
        return Submission(group, refused)
    return Submission(group, whole.header, answer_of(whole))


def hello_from_wire(peer: Peer, hello: rollout_pb2.DrainHello) -> Hello:
    """Return how a learner begins its stream. Raises RefusedError: OVER_LIMIT; MALFORMED."""
    if len(hello.held_group_ids) > HELD_GROUPS:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"a learner that holds {len(hello.held_group_ids)} groups, at most {HELD_GROUPS} are allowed",
        )
    return Hello(
        peer.node_id,
        hello.learner_epoch,
        hello.version,
        records=tuple(from_wire(StepRecord, step) for step in hello.steps),
        held_group_ids=tuple(hello.held_group_ids),
        trained_slots=_runs(hello.trained_slots),
    )


def said_from_wire(request: rollout_pb2.DrainRolloutsRequest) -> Said:
    """Return what a learner says after its hello; a number: credits. Raises RefusedError: MALFORMED."""
    match request.WhichOneof("message"):
        case "credit":
            return request.credit.groups
        case "judgement":
            detail = request.judgement.detail[:_DETAIL_CHARACTERS]
            return from_wire(GroupVerdict, request.judgement, detail=detail)
        case "step":
            return from_wire(StepRecord, request.step)
        case "quarantine":
            told = request.quarantine
            if not is_name(told.sampler_id):
                what = f"{told.sampler_id[:100]!r} is not the node id of a sampler"
                raise RefusedError(Reason.MALFORMED, what)
            return Quarantine(told.sampler_id, detail_of(told.reason))
        case "order_answer":
            answer = detail_of(request.order_answer.answer) or "done"
            return from_wire(OrderAnswer, request.order_answer, answer=answer)
        case other:
            raise RefusedError(Reason.MALFORMED, f"a message with {other or 'nothing'} after the hello")


def outgoing_to_wire(
    outgoing: EncodedGroup | int | Quarantines | OrdersTold,
) -> rollout_pb2.DrainRolloutsResponse:
    """Return what a learner is sent; a number: the version whose records are on disk."""
    if isinstance(outgoing, Quarantines):
        quarantines = rollout_pb2.Quarantines(releases_others=outgoing.releases_others)
        for one in outgoing.samplers:
            quarantines.samplers.add(sampler_id=one.sampler_id, reason=one.quarantine)
        return rollout_pb2.DrainRolloutsResponse(quarantines=quarantines)
    if isinstance(outgoing, OrdersTold):
        orders = [to_wire(orders_pb2.Order, order) for order in outgoing.orders]
        return rollout_pb2.DrainRolloutsResponse(orders=rollout_pb2.LearnerOrders(orders=orders))
    if isinstance(outgoing, int):
        acknowledged = rollout_pb2.StepAcknowledged(version=outgoing)
        return rollout_pb2.DrainRolloutsResponse(step_acknowledged=acknowledged)
    return delivery_to_wire(outgoing)


def _runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return runs of slots. Raises RefusedError: MALFORMED; they are not runs in ascending order."""
    runs = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    is_ascending = all(before <= after for before, after in pairwise(numbers))
    if len(numbers) % 2 or len(runs) > TRAINED_RUNS or not is_ascending or (runs and runs[0][0] < 0):
        raise RefusedError(
            Reason.MALFORMED, f"{len(numbers)} numbers are not runs of slots in ascending order"
        )
    return runs
