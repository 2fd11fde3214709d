"""Roles that may set a field about themselves: the fields of Join and heartbeats that belong to some roles
only.

A field that is not listed here is every member's.
"""

from collections.abc import Mapping
from typing import Final

from google.protobuf.message import Message

from heterorl.v1 import membership_pb2
from node.errors import Reason, RefusedError
from node.run import Role

_LEARNER: Final = frozenset({Role.LEARNER})
_SAMPLER: Final = frozenset({Role.SAMPLER})
_RELAY: Final = frozenset({Role.RELAY})
_HAS_MODEL: Final = _LEARNER | _SAMPLER

OWNERS: Final[Mapping[type[Message], Mapping[str, frozenset[Role]]]] = {
    membership_pb2.JoinRequest: {
        "layout_digest": _HAS_MODEL,
        "tokenizer_digest": _HAS_MODEL,
        "chat_template_digest": _HAS_MODEL,
        "learner_epoch": _LEARNER,
        "vocabulary_size": _LEARNER,
        "context_tokens": _LEARNER,
        "prompts": _SAMPLER,
        "base_root": _HAS_MODEL,
        "base_parts": _HAS_MODEL,
        "base_part_names": _HAS_MODEL,
        "layout_summary": _HAS_MODEL,
        "task_digest": _SAMPLER,
        "grader_digest": _SAMPLER,
    },
    membership_pb2.HeartbeatRequest: {
        "running_lease_ids": _SAMPLER,
        "step": _LEARNER,
        "teaching": _LEARNER,
        "best_version": _LEARNER,
        "revocations_digest": _RELAY,
    },
}


def check_owners(message: Message, role: Role) -> None:
    """Check that a member of this role may say all that it says.

    Raises RefusedError: WRONG_ROLE; names the field and whose it is.
    """
    owners = OWNERS[type(message)]
    for field, _ in message.ListFields():
        allowed = owners.get(field.name)
        if allowed is not None and role not in allowed:
            raise RefusedError(
                Reason.WRONG_ROLE,
                f"a {role} set {field.name}, which is for {', '.join(sorted(allowed))} to say",
                fix="run the coordinator's version of heterorl-node",
            )
