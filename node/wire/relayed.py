"""Refusals that a relay hands down to its samplers."""

from typing import Final

from heterorl.v1 import relay_pb2
from node.errors import Reason, RefusedError
from node.wire.mapping import member_from_wire

_DETAIL_CHARACTERS: Final = 1000


def refusal_to_wire(refused: RefusedError) -> relay_pb2.CarriedRefusal:
    """Return the message of a refusal."""
    return relay_pb2.CarriedRefusal(reason=refused.reason.value, detail=str(refused)[:_DETAIL_CHARACTERS])


def refusal_from_wire(message: relay_pb2.CarriedRefusal) -> RefusedError:
    """Return the refusal in a message. Raises RefusedError: MALFORMED; its reason is not one we know."""
    return RefusedError(member_from_wire(Reason, message, "reason"), message.detail, is_remote=True)
