"""Who gets in: every rpc of every service against every kind of caller, over real mutual TLS."""

import time
from pathlib import Path

import grpc.aio
import pytest

from node.enrolment.authority import AUTHORITY_LIFETIME_S
from node.errors import Reason, RefusedError, StartupError
from node.identity.identity_store import Identity
from node.identity.peer import Peer
from node.rpc.auth import RULES, service_of
from node.rpc.channel import ConnectionLost, Purpose, classified, dial
from node.rpc.server import Audience
from node.run import Role
from support.clock import ManualClock
from support.identity import MadeRun, make_run
from support.rpc import METHODS, every_service, invoke, serving

MEMBERS_ONLY = [path for path in METHODS if RULES[path].roles is not None]


def channel_of(identity: Identity, address: str) -> grpc.aio.Channel:
    # A moment at which even the bad ones look good to themselves: the hub must not rely on that.
    return dial(address, identity, purpose=Purpose.CONTROL, now=identity.not_before_s + 1)


@pytest.mark.parametrize("path", METHODS)
async def test_a_certificate_of_an_allowed_role_is_let_in(made: MadeRun, path: str) -> None:
    roles = RULES[path].roles or frozenset(Role)
    async with serving(made, every_service) as hub:
        for role in roles:
            async with channel_of(made.of(role), hub.address) as channel:
                assert await invoke(channel, path) == [b""]


@pytest.mark.parametrize("path", METHODS)
@pytest.mark.parametrize("who", ["expired", "not_yet_valid", "foreign"])
async def test_a_certificate_that_is_not_valid_here_and_now_fails_the_handshake(
    made: MadeRun, path: str, who: str
) -> None:
    async with serving(made, every_service) as hub:
        # What a liar would do: trust the right hub, show the wrong certificate.
        liar = getattr(made, who)
        credentials = grpc.ssl_channel_credentials(
            made.run.ca_certificate_pem, liar.key_pem, liar.certificate_pem
        )
        options = [("grpc.ssl_target_name_override", f"hub.{made.run_id}.heterorl")]
        async with grpc.aio.secure_channel(hub.address, credentials, options) as channel:
            with pytest.raises(ConnectionLost, match="UNAVAILABLE"), classified():
                await invoke(channel, path)


@pytest.mark.parametrize("path", METHODS)
async def test_a_caller_without_a_certificate_fails_the_handshake(made: MadeRun, path: str) -> None:
    async with serving(made, every_service) as hub:
        credentials = grpc.ssl_channel_credentials(made.run.ca_certificate_pem)
        options = [("grpc.ssl_target_name_override", f"hub.{made.run_id}.heterorl")]
        async with grpc.aio.secure_channel(hub.address, credentials, options) as channel:
            with pytest.raises(ConnectionLost, match="UNAVAILABLE"), classified():
                await invoke(channel, path)


@pytest.mark.parametrize("path", METHODS)
async def test_a_caller_without_tls_is_not_understood(made: MadeRun, path: str) -> None:
    async with serving(made, every_service) as hub:
        peer = made.sampler.peer
        async with dial(hub.address, peer, purpose=Purpose.CONTROL, now=0) as channel:
            with pytest.raises(ConnectionLost), classified():
                await invoke(channel, path)


@pytest.mark.parametrize("path", MEMBERS_ONLY)
async def test_a_certificate_of_another_role_is_refused_as_wrong_role(made: MadeRun, path: str) -> None:
    others = frozenset(Role) - (RULES[path].roles or frozenset())
    async with serving(made, every_service) as hub:
        for role in others:
            async with channel_of(made.of(role), hub.address) as channel:
                with pytest.raises(RefusedError) as refused, classified():
                    await invoke(channel, path)
                assert refused.value.reason is Reason.WRONG_ROLE
        assert hub.refusals[service_of(path), Reason.WRONG_ROLE] == len(others)


@pytest.mark.parametrize("path", MEMBERS_ONLY)
async def test_what_is_for_members_is_refused_on_the_port_for_strangers(made: MadeRun, path: str) -> None:
    async with (
        serving(made, every_service, audience=Audience.STRANGERS) as hub,
        channel_of(made.sampler, hub.address) as channel,
    ):
        with pytest.raises(RefusedError) as refused, classified():
            await invoke(channel, path)
        assert refused.value.reason is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("path", MEMBERS_ONLY)
async def test_a_certificate_that_expires_while_connected_is_refused_at_the_next_rpc(
    made: MadeRun, path: str
) -> None:
    clock = ManualClock(now=made.made_at_s)
    role = min(RULES[path].roles or ())
    async with (
        serving(made, every_service, clock=clock) as hub,
        channel_of(made.of(role), hub.address) as channel,
    ):
        assert await invoke(channel, path) == [b""]
        clock.advance(AUTHORITY_LIFETIME_S)
        with pytest.raises(RefusedError, match="expired") as refused, classified():
            await invoke(channel, path)
        # Not final by itself: the hub's clock may be wrong. So that its caller can tell, it says the time.
        assert refused.value.reason is Reason.EXPIRED
        assert refused.value.hub_now_s == pytest.approx(clock.now(), abs=0.01)


@pytest.mark.parametrize("path", MEMBERS_ONLY)
async def test_a_revoked_node_is_refused_at_its_next_rpc_and_its_neighbour_is_not(
    made: MadeRun, path: str
) -> None:
    role = min(RULES[path].roles or ())
    revoked, neighbour = made.of(role), made.issue(role, "neighbour")
    async with (
        serving(made, every_service) as hub,
        channel_of(revoked, hub.address) as channel,
        channel_of(neighbour, hub.address) as neighbours_channel,
    ):
        assert await invoke(channel, path) == [b""]
        hub.revoked.write_text(f"{revoked.node_id}  # its disk was sold\n")
        with pytest.raises(RefusedError, match="revoked") as refused, classified():
            await invoke(channel, path)
        assert refused.value.reason is Reason.UNAUTHENTICATED
        assert await invoke(neighbours_channel, path) == [b""]


@pytest.mark.parametrize("path", MEMBERS_ONLY)
async def test_with_tls_off_the_name_a_caller_gives_decides_its_role(made: MadeRun, path: str) -> None:
    roles = RULES[path].roles or frozenset()
    async with serving(made, every_service, tls=False) as hub:
        for role in Role:
            caller = Peer(made.run_id, role, "someone")
            async with dial(hub.address, caller, purpose=Purpose.CONTROL, now=0) as channel:
                if role in roles:
                    assert await invoke(channel, path) == [b""]
                    continue
                with pytest.raises(RefusedError) as refused, classified():
                    await invoke(channel, path)
                assert refused.value.reason is Reason.WRONG_ROLE


async def test_with_tls_off_a_caller_of_another_run_or_without_a_name_is_refused(made: MadeRun) -> None:
    path = "/heterorl.v1.MembershipService/GetStatus"
    async with serving(made, every_service, tls=False) as hub:
        stranger = Peer("another-run", Role.SAMPLER, "s1")
        async with dial(hub.address, stranger, purpose=Purpose.CONTROL, now=0) as channel:
            with pytest.raises(RefusedError) as refused, classified():
                await invoke(channel, path)
            assert refused.value.reason is Reason.FOREIGN_RUN
        async with grpc.aio.insecure_channel(hub.address) as channel:
            with pytest.raises(RefusedError) as refused, classified():
                await invoke(channel, path)
            assert refused.value.reason is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("role", [Role.SAMPLER, Role.LEARNER, Role.OPERATOR])
async def test_a_member_that_is_no_hub_cannot_pose_as_one(made: MadeRun, role: Role) -> None:
    async with (
        serving(made, every_service, identity=made.issue(role, "impostor")) as hub,
        channel_of(made.sampler, hub.address) as channel,
    ):
        with pytest.raises(ConnectionLost, match="not a hub of this run"), classified():
            await invoke(channel, "/heterorl.v1.PolicyService/GetManifest")


async def test_a_relay_is_trusted_as_a_hub(made: MadeRun) -> None:
    async with (
        serving(made, every_service, identity=made.relay) as hub,
        channel_of(made.sampler, hub.address) as channel,
    ):
        assert await invoke(channel, "/heterorl.v1.PolicyService/GetManifest") == [b""]


async def test_the_hub_of_another_run_is_not_trusted_even_under_the_same_name(
    made: MadeRun, tmp_path: Path
) -> None:
    twin = make_run(tmp_path / "twin", now=time.time())
    async with serving(twin, every_service) as hub, channel_of(made.sampler, hub.address) as channel:
        with pytest.raises(ConnectionLost, match="not a hub of this run"), classified():
            await invoke(channel, "/heterorl.v1.PolicyService/GetManifest")


def test_an_expired_node_is_told_so_before_it_dials(made: MadeRun) -> None:
    with pytest.raises(StartupError, match=r"expired at .*heterorl-node token"):
        dial("127.0.0.1:1", made.expired, purpose=Purpose.CONTROL, now=made.made_at_s)
