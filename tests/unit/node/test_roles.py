"""The rows of roles lead to what they name."""

import pkgutil
from pathlib import Path

import pytest

from heterorl.v1 import common_pb2
from node.config.settings import SECTIONS
from node.values.roles import ROLES, Role

METRICS = Path(__file__).parents[3] / "deploy/monitoring/METRICS.md"


@pytest.mark.parametrize("role", ROLES)
def test_what_a_row_names_is_there(role: Role) -> None:
    traits = ROLES[role]
    assert callable(pkgutil.resolve_name(traits.build))
    assert pkgutil.resolve_name(SECTIONS[role]).model_fields
    assert not traits.is_hub or "listen" in pkgutil.resolve_name(traits.config).model_fields
    assert f"`{traits.version_gauge}`" in METRICS.read_text() or not traits.version_gauge


def test_each_role_has_a_number_in_the_protocol() -> None:
    assert {f"ROLE_{role.name}" for role in Role} | {"ROLE_UNSPECIFIED"} == set(common_pb2.Role.keys())


def test_hubs_start_before_the_peers_that_dial_them() -> None:
    is_hub = [traits.is_hub for traits in ROLES.values()]
    assert is_hub == sorted(is_hub, reverse=True)
    assert list(ROLES) == [role for role in Role if role is not Role.OPERATOR]
