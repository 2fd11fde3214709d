from typing import Any

import pytest
from google.protobuf.message import Message

from heterorl.v1 import membership_pb2
from node.errors import Reason
from node.values.roles import MEMBER_ROLES, Role
from node.wire.members import OWNERS, base_model_from_wire, check_owners
from support.refusals import refused

SAID: dict[str, object] = {
    "layout_digest": b"l" * 16,
    "tokenizer_digest": b"t" * 16,
    "chat_template_digest": b"c" * 16,
    "learner_epoch": 1,
    "vocabulary_size": 100,
    "context_tokens": 64,
    "prompts": 10,
    "base_root": b"r" * 16,
    "base_parts": b"p" * 8,
    "base_part_names": ["embed"],
    "layout_summary": "layers 2",
    "text_digest": b"x" * 16,
    "text_summary": "end tokens\t[2]",
    "task_digest": b"o" * 16,
    "grader_digest": b"g" * 16,
    "sampler": membership_pb2.SamplerFigures(starving_s=1.0),
    "teaching": membership_pb2.Teaching(groups=1),
    "best_version": 3,
    "changes": ["learning_rate 0.001 -> 0.0005 since step 41"],
    "version_groups": 8,
    "running_lease_ids": ["0.1"],
    "step": membership_pb2.StepReport(version=1),
    "revocations_digest": b"d" * 16,
}


@pytest.mark.parametrize(
    ("message_type", "field"), [(message, field) for message, fields in OWNERS.items() for field in fields]
)
@pytest.mark.parametrize("role", MEMBER_ROLES)
def test_a_field_is_taken_from_its_owners_only(message_type: type[Message], field: str, role: Role) -> None:
    message = message_type(**{field: SAID[field]})
    if role in OWNERS[message_type][field]:
        check_owners(message, role)
        return
    with refused(Reason.WRONG_ROLE, role, field):
        check_owners(message, role)


def test_what_everybody_says_everybody_may_say() -> None:
    for role in (Role.LEARNER, Role.SAMPLER, Role.RELAY):
        check_owners(membership_pb2.JoinRequest(run_id="run", instance="i"), role)
        check_owners(membership_pb2.HeartbeatRequest(sequence=1, waits_for="x", clock_offset_s=1.0), role)


@pytest.mark.parametrize(
    "said", [{"base_root": b"r"}, {"base_parts": b"p" * 513}, {"base_part_names": ["a"] * 65}]
)
def test_a_base_model_over_the_limits_is_refused(said: dict[str, Any]) -> None:
    with refused(Reason.MALFORMED):
        base_model_from_wire(membership_pb2.JoinRequest(**said))
