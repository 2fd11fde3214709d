"""The fields of Join and heartbeats: who may set them, and how much they may hold."""

import functools
from collections.abc import Mapping
from typing import Final

from google.protobuf.message import Message

from heterorl.v1 import membership_pb2
from node.errors import Reason, RefusedError
from node.values.policy import BASE_PART_BYTES, BASE_PARTS, ROOT_BYTES, BaseModel
from node.values.protocol import Spoken, spoken_by
from node.values.run import Role

_LEARNER: Final = frozenset({Role.LEARNER})
_SAMPLER: Final = frozenset({Role.SAMPLER})
_SERVES: Final = frozenset({Role.RELAY, Role.LEARNER})
_GRADES: Final = frozenset({Role.SAMPLER, Role.VERIFIER})
_HAS_MODEL: Final = _LEARNER | _SAMPLER | {Role.CONTRIBUTOR}
_HAS_TOKENIZER: Final = _HAS_MODEL | {Role.VERIFIER}

OWNERS: Final[Mapping[type[Message], Mapping[str, frozenset[Role]]]] = {
    membership_pb2.JoinRequest: {
        "layout_digest": _HAS_MODEL,
        "tokenizer_digest": _HAS_TOKENIZER,
        "chat_template_digest": _HAS_TOKENIZER,
        "learner_epoch": _LEARNER,
        "vocabulary_size": _LEARNER,
        "context_tokens": _LEARNER,
        "prompts": _SAMPLER,
        "base_root": _HAS_MODEL,
        "base_parts": _HAS_MODEL,
        "base_part_names": _HAS_MODEL,
        "layout_summary": _HAS_MODEL,
        "text_digest": _HAS_TOKENIZER,
        "text_summary": _HAS_TOKENIZER,
        "task_digest": _GRADES,
        "grader_digest": _GRADES,
    },
    membership_pb2.HeartbeatRequest: {
        "running_lease_ids": _SAMPLER,
        "step": _LEARNER,
        "teaching": _LEARNER,
        "best_version": _LEARNER,
        "changes": _LEARNER,
        "version_groups": _LEARNER,
        "revocations_digest": _SERVES,
        "sampler": _SAMPLER,
    },
}
"""Roles that may set a field. A field that is not listed is every member's."""


def check_owners(message: Message, role: Role) -> None:
    """Check that a member of this role may say all that it says.

    Raises RefusedError: WRONG_ROLE; names the field and whose it is.
    """
    for name, has_presence in _of_others(type(message), role):  # type: ignore[arg-type]  # a class is hashable
        if message.HasField(name) if has_presence else getattr(message, name):
            raise RefusedError(
                Reason.WRONG_ROLE,
                f"a {role} set {name}, which is for {', '.join(sorted(OWNERS[type(message)][name]))} to say",
                fix="run the coordinator's version of heterorl-node",
            )


@functools.cache
def _of_others(message_type: type[Message], role: Role) -> tuple[tuple[str, bool], ...]:
    """Return the fields that a role may not set, each with whether unset differs from empty."""
    fields = message_type.DESCRIPTOR.fields_by_name
    return tuple(
        (name, fields[name].has_presence)
        for name, allowed in OWNERS[message_type].items()
        if role not in allowed
    )


def spoken_from_wire(message: membership_pb2.JoinRequest | membership_pb2.JoinResponse) -> Spoken:
    """Return the protocols that the sender speaks. Raises RefusedError: MALFORMED."""
    return spoken_by(
        protocol=message.protocol,
        oldest_protocol=message.oldest_protocol,
        software_version=message.software_version,
    )


def base_model_from_wire(request: membership_pb2.JoinRequest) -> BaseModel:
    """Return what a peer says of its version 0 when it joins. Raises RefusedError: MALFORMED."""
    base = BaseModel(request.base_root, request.base_parts, tuple(request.base_part_names))
    if (
        len(base.root) not in (0, ROOT_BYTES)
        or len(base.parts) > BASE_PARTS * BASE_PART_BYTES
        or len(base.part_names) > BASE_PARTS
    ):
        raise RefusedError(
            Reason.MALFORMED,
            f"a base model with a root of {len(base.root)} bytes, {len(base.parts)} bytes of parts and "
            f"{len(base.part_names)} names; allowed are {ROOT_BYTES}, {BASE_PARTS * BASE_PART_BYTES} and "
            f"{BASE_PARTS}",
        )
    return base
