"""A role as messages have it, for peers that write their messages themselves."""

from typing import Any

from heterorl.v1 import common_pb2
from node.values.roles import Role


def role_to_wire(role: Role) -> Any:
    return common_pb2.Role.Value(f"ROLE_{role.name}")
