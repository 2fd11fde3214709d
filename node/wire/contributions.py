"""Contributions, and what their senders are told, <-> heterorl.v1."""

from collections.abc import Iterator
from typing import Final

from heterorl.v1 import merge_pb2
from node.values.contribution import (
    Contribution,
    ContributionAnswer,
    GroupsTaken,
    MergeTerms,
    ToContributor,
)
from node.values.groups.rollout import EncodedGroup
from node.wire.mapping import from_wire, to_wire
from node.wire.rollouts import encoded_from_wire, fill_group

PART_BYTES: Final = 1 << 20
"""Largest part of a payload in one message, as merge.proto allows."""

_Message = merge_pb2.ContributeResponse


def contribution_to_wire(contribution: Contribution) -> Iterator[merge_pb2.ContributeRequest]:
    """Yield a contribution's header and the parts of its payload."""
    payload = contribution.payload
    header = merge_pb2.ContributionHeader(
        number=contribution.number,
        base_version=contribution.base_version,
        report=contribution.report,
        payload_bytes=len(payload),
        digest=contribution.digest,
    )
    yield merge_pb2.ContributeRequest(contribution=header)
    for at in range(0, len(payload), PART_BYTES):
        yield merge_pb2.ContributeRequest(payload=payload[at : at + PART_BYTES])


def told_to_wire(told: ToContributor) -> _Message:
    """Return a message to a contributor."""
    match told:
        case MergeTerms():
            return _Message(terms=to_wire(merge_pb2.MergeTerms, told))
        case ContributionAnswer():
            return _Message(answer=to_wire(merge_pb2.ContributionAnswer, told))
        case GroupsTaken():
            return _Message(taken=to_wire(merge_pb2.GroupsTaken, told))
        case EncodedGroup():
            message = _Message()
            fill_group(message.group, told)
            return message


def told_from_wire(message: _Message) -> ToContributor | None:
    """Return what the learner has told; None: a later version's message, which is passed over."""
    match message.WhichOneof("message"):
        case "terms":
            return from_wire(MergeTerms, message.terms)
        case "answer":
            return from_wire(ContributionAnswer, message.answer)
        case "taken":
            return from_wire(GroupsTaken, message.taken)
        case "group":
            return encoded_from_wire(message.group)
    return None
