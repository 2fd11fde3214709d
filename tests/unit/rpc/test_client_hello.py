"""The name that a TLS connection begins with, by the hellos of real clients."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.rpc.channel import Purpose, dial
from node.rpc.strangers.client_hello import MOST_BYTES, server_name_in
from node.values.roles import Role
from support.client_hello import client_hello
from support.identity import make_run

HELLO = client_hello("relay.Example.heterorl")
NOT_TLS = {
    "http": b"GET / HTTP/1.1\r\n",
    "http 2 without tls": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "another version": b"\x16\x04" + HELLO[2:],
    "another handshake message": HELLO[:5] + b"\x02" + HELLO[6:],
    "an extension that ends too soon": HELLO[:-1],
}


def in_records(hello: bytes, size_bytes: int) -> bytes:
    """Return a hello as records of at most so many bytes each."""
    handshake = hello[5:]
    parts = [handshake[at : at + size_bytes] for at in range(0, len(handshake), size_bytes)]
    return b"".join(hello[:3] + len(part).to_bytes(2) + part for part in parts)


def test_the_name_is_found_in_small_letters_and_may_be_missing() -> None:
    assert server_name_in(HELLO) == "relay.example.heterorl"
    assert server_name_in(client_hello(None)) == ""


@given(st.integers(0, len(HELLO) - 1))
def test_a_part_of_a_hello_is_waited_for(size_bytes: int) -> None:
    assert server_name_in(HELLO[:size_bytes]) is None


@given(st.integers(1, len(HELLO)))
def test_a_hello_may_come_in_several_records_and_more_may_follow_it(size_bytes: int) -> None:
    assert server_name_in(in_records(HELLO, size_bytes) + b"\x14\x03\x03") == "relay.example.heterorl"


@pytest.mark.parametrize("received", NOT_TLS.values(), ids=NOT_TLS)
def test_what_does_not_begin_as_tls_does_is_refused_or_waited_for(received: bytes) -> None:
    if received == HELLO[:-1]:
        assert server_name_in(received) is None
        received = HELLO[:3] + (len(HELLO) - 6).to_bytes(2) + HELLO[5:6]
        received += (len(HELLO) - 10).to_bytes(3) + HELLO[9:-1]
    with pytest.raises(ValueError, match="TLS"):
        server_name_in(received)


@given(st.binary(max_size=300), st.integers(0, len(HELLO)))
def test_nothing_but_a_value_error_comes_of_damage(damage: bytes, at: int) -> None:
    with contextlib.suppress(ValueError):
        server_name_in(HELLO[:at] + damage + HELLO[at + len(damage) :])


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.RELAY])
async def test_grpc_asks_for_the_role_that_it_dials(tmp_path: Path, role: Role) -> None:
    made = make_run(tmp_path, now=time.time())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with dial(address, made.sampler, purpose=Purpose.BULK, now=time.time(), server=role) as channel:
            channel.get_state(try_to_connect=True)
            loop = asyncio.get_running_loop()
            connection, _ = await loop.sock_accept(listener)
            with connection:
                received = b""
                while (name := server_name_in(received)) is None:
                    received += await loop.sock_recv(connection, MOST_BYTES)
    assert name == f"{'relay' if role is Role.RELAY else 'hub'}.{made.run_id}.heterorl"
