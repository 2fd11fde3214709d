"""Which connections are shut when descriptors run short, and how a socket is found and shut by its number."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from node.errors import Reason
from node.identity.peer import Peer
from node.rpc.strangers.connection_guard import (
    RELAYED_STRANGERS,
    Connection,
    ConnectionGuard,
    Owners,
    to_shut,
)
from node.system import descriptors
from node.values.roles import Role
from support.waiting import until


def connections(*groups: str) -> list[Connection]:
    """Connections by whom they count for; members' names are capital."""
    return [
        Connection(number, f"ipv4:192.0.2.1:{number}", group, group.isupper())
        for number, group in enumerate(groups)
    ]


def shut_groups(*groups: str, excess: int) -> str:
    return "".join(each.group for each in to_shut(connections(*groups), excess))


def test_nothing_is_shut_while_there_is_room() -> None:
    assert to_shut(connections(*"aaaaaaaaaA"), 0) == []
    assert to_shut(connections(*"aaaaaaaaaA"), -5) == []


def test_strangers_go_first_and_the_address_with_the_most_before_others() -> None:
    assert shut_groups(*"AAAAbaaac", excess=2) == "aa"
    assert sorted(shut_groups(*"AAAAbaaac", excess=5)) == sorted("aaabc")


def test_members_go_only_when_no_strangers_are_left_and_who_has_the_most_first() -> None:
    assert shut_groups(*"ABBBBBAa", excess=3) == "aBB"


def test_an_address_keeps_no_more_than_a_peer_needs_once_room_is_short() -> None:
    assert shut_groups(*"aaaaaaaaab", excess=1) == "aaaaa"


def from_a_relay(number: int) -> list[Connection]:
    return [Connection(n, f"ipv4:192.0.2.2:{n}", "r", False, kept=RELAYED_STRANGERS) for n in range(number)]


def test_strangers_from_a_relays_address_are_kept_as_samplers_behind_it_may_be() -> None:
    strangers = [*from_a_relay(RELAYED_STRANGERS), *connections(*"aaaaaaA")]
    assert [one.group for one in to_shut(strangers, 1)] == ["a", "a"]  # beyond what one peer needs
    beyond = to_shut([*from_a_relay(RELAYED_STRANGERS + 3), *connections("A")], 1)
    assert [one.group for one in beyond] == ["r"] * 3


def test_whoever_comes_by_a_relays_address_is_shut_before_any_member() -> None:
    shut = to_shut([*connections(*"AAAAAA"), *from_a_relay(5)], 5)
    assert [one.group for one in shut] == ["r"] * 5


def test_an_owner_is_forgotten_when_too_many_others_have_called_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.rpc.strangers.connection_guard.MOST_OWNERS", 2)
    owners = Owners()
    s1, s2, s3 = (Peer("run", Role.SAMPLER, name) for name in ("s1", "s2", "s3"))
    for remote, owner in (("1", s1), ("2", s2), ("1", s1), ("3", s3)):
        owners.note(remote, owner)
    assert [owners.owner_of(remote) for remote in "123"] == [s1, None, s3]


def fail(_: str) -> list[str]:
    raise OSError


@contextlib.contextmanager
def connected(listener: socket.socket, address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=5) as client, listener.accept()[0]:
        yield client


@pytest.mark.parametrize(
    ("host", "can_list", "role"),
    [
        ("127.0.0.1", True, Role.SAMPLER),
        ("127.0.0.1", True, Role.RELAY),
        ("::1", False, Role.SAMPLER),
        ("::", True, Role.SAMPLER),
        ("::", False, Role.RELAY),
    ],
)
async def test_a_connection_nobody_has_called_over_is_shut_and_a_members_is_not(
    monkeypatch: pytest.MonkeyPatch, host: str, can_list: bool, role: Role
) -> None:
    is_wildcard = host == "::"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dial_host = "127.0.0.1" if is_wildcard else host
    refusals: list[tuple[str, Reason]] = []

    def count_refusal(*, service: str, reason: Reason) -> None:
        refusals.append((service, reason))

    with socket.create_server((host, 0), family=family, dualstack_ipv6=is_wildcard) as listener:
        port = listener.getsockname()[1]
        with (
            connected(listener, (dial_host, port)) as member,
            connected(listener, (dial_host, port)) as stranger,
        ):
            owners, stopping = Owners(), asyncio.Event()
            own_host, own_port = member.getsockname()[:2]
            owners.note(
                f"ipv6:%5B{own_host}%5D:{own_port}" if ":" in own_host else f"ipv4:{own_host}:{own_port}",
                Peer("run", role, "named"),
            )
            monkeypatch.setattr(descriptors, "limit", lambda: 500)
            monkeypatch.setattr(descriptors, "open_now", lambda: 500 - descriptors.reserve(500) + 1)
            if not can_list:
                monkeypatch.setattr(os, "listdir", fail)
            guarding = asyncio.create_task(ConnectionGuard(port, owners, count_refusal).run(stopping))
            await until(lambda: refusals != [])
            stopping.set()
            await guarding
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
            member.settimeout(0.05)
            with pytest.raises(TimeoutError):
                member.recv(1)
    assert refusals == [("connections", Reason.BUSY)]


@pytest.mark.parametrize(("role", "shut"), [(Role.RELAY, 1), (Role.SAMPLER, 3)])
async def test_strangers_who_come_where_a_relay_calls_from_are_taken_for_samplers_behind_it(
    monkeypatch: pytest.MonkeyPatch, role: Role, shut: int
) -> None:
    refusals: list[Reason] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        member, *_ = (
            stack.enter_context(connected(listener, ("127.0.0.1", port)))
            for _ in range(1 + descriptors.CONNECTIONS_PER_PEER + shut)
        )
        owners, stopping = Owners(), asyncio.Event()
        owners.note("ipv4:{}:{}".format(*member.getsockname()), Peer("run", role, "named"))
        monkeypatch.setattr(descriptors, "limit", lambda: 500)
        looks = iter([500 - descriptors.reserve(500) + 1])  # one too many, once
        monkeypatch.setattr(descriptors, "open_now", lambda: next(looks, 0))
        guard = ConnectionGuard(port, owners, lambda *, service, reason: refusals.append(reason))
        guarding = asyncio.create_task(guard.run(stopping))
        await until(lambda: len(refusals) >= shut)
        stopping.set()
        await guarding
    assert len(refusals) == shut
