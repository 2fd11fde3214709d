"""Contributions, and what their senders are told, <-> heterorl.v1."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

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

_FIELDS: Final[Mapping[type, Any]] = {MergeTerms: "terms", ContributionAnswer: "answer", GroupsTaken: "taken"}
"""Fields of a message, but that of a group, whose bytes are large and not copied twice."""


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
    message = _Message()
    if isinstance(told, EncodedGroup):
        fill_group(message.group, told)
    else:
        field = getattr(message, _FIELDS[type(told)])
        field.CopyFrom(to_wire(type(field), told))
    return message


def told_from_wire(message: _Message) -> ToContributor | None:
    """Return what the learner has told; None: a later version's message, which is passed over."""
    if message.HasField("group"):
        return encoded_from_wire(message.group)
    for kind, name in _FIELDS.items():
        if message.HasField(name):
            return from_wire(kind, getattr(message, name))
    return None
