import pytest

from node.errors import Reason
from node.identity.peer import SERVING_ROLES, Peer, is_name, server_name
from node.values.roles import Role
from support.refusals import refused


@pytest.mark.parametrize("role", list(Role))
def test_a_peer_is_read_back_from_its_name(role: Role) -> None:
    peer = Peer("run-1", role, "node-7")
    assert peer.spiffe_id == f"spiffe://run-1/{role}/node-7"
    assert Peer.from_spiffe_id(peer.spiffe_id) == peer


@pytest.mark.parametrize(
    "name",
    [
        "",
        "spiffe://",
        "spiffe://run/sampler",
        "spiffe://run/sampler/",
        "spiffe://run/sampler/a/b",
        "spiffe://run/admin/a",
        "spiffe://run/Sampler/a",
        "spiffe:///sampler/a",
        "spiffe://run/sampler/A",
        "spiffe://run/sampler/a\n",
        "spiffe://run/sampler/-a",
        "spiffe://run/sampler/" + "a" * 64,
        "https://run/sampler/a",
        "run/sampler/a",
        " spiffe://run/sampler/a",
    ],
)
def test_anything_else_names_nobody(name: str) -> None:
    with refused(Reason.UNAUTHENTICATED):
        Peer.from_spiffe_id(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", True),
        ("a-b", True),
        ("7" * 63, True),
        ("7" * 64, False),
        ("a-", False),
        ("a\n", False),
        ("", False),
    ],
)
def test_a_name_is_a_dns_label(text: str, expected: bool) -> None:
    assert is_name(text) is expected


def test_those_that_serve_in_a_role_have_a_name_of_their_own_in_each_run() -> None:
    assert server_name("a", Role.COORDINATOR) == "hub.a.heterorl"
    names = {server_name(run, role) for run in "ab" for role in SERVING_ROLES}
    assert len(names) == 6
    with pytest.raises(ValueError, match="sampler"):
        server_name("a", Role.SAMPLER)
