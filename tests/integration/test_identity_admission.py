"""Who gets in: every rpc of every service against every kind of caller, over real mutual TLS."""

import time
from collections import Counter
from pathlib import Path

import grpc.aio
import pytest

from node.enrolment.authority import AUTHORITY_LIFETIME_S
from node.errors import Reason, StartupError
from node.identity.identity_store import Identity
from node.identity.peer import Peer
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.calls.rpc_rules import RULES, service_of
from node.rpc.calls.server import Audience
from node.rpc.channel import Purpose, dial
from node.values.roles import Role
from support.clock import ManualClock
from support.identity import MadeRun, make_run
from support.rpc import METHODS, counted_refusal, every_service, invoke, refusal_of, serving

LEASE = "/heterorl.v1.RolloutService/LeasePrompts"
MANIFEST = "/heterorl.v1.PolicyService/GetManifest"
MEMBERS_ONLY = [path for path in METHODS if RULES[path].roles is not None]


def channel_of(identity: Identity, address: str) -> grpc.aio.Channel:
    # A moment at which even the bad ones look good to themselves: the hub must not rely on that.
    return dial(address, identity, purpose=Purpose.CONTROL, now=identity.not_before_s + 1)


@pytest.mark.parametrize("role", list(Role))
async def test_a_certificate_is_let_in_where_its_role_is_allowed_and_refused_elsewhere(
    made: MadeRun, role: Role
) -> None:
    async with serving(made, every_service) as hub, channel_of(made.of(role), hub.address) as channel:
        refused: Counter[tuple[str, Reason]] = Counter()
        for path in METHODS:
            if role in (RULES[path].roles or Role):
                assert await invoke(channel, path) == [b""]
            else:
                refusal, times = await counted_refusal(channel, path)
                assert refusal.reason is Reason.WRONG_ROLE
                refused[service_of(path), Reason.WRONG_ROLE] += times
        assert hub.refusals == refused


@pytest.mark.parametrize("who", ["expired", "not_yet_valid", "foreign", None])
async def test_a_certificate_that_is_not_valid_here_and_now_or_missing_fails_the_handshake(
    made: MadeRun, who: str | None
) -> None:
    # What a liar would do: trust the right hub, show the wrong certificate.
    liar = getattr(made, who) if who else None
    shown = (liar.key_pem, liar.certificate_pem) if liar else ()
    credentials = grpc.ssl_channel_credentials(made.run.ca_certificate_pem, *shown)
    options = [("grpc.ssl_target_name_override", f"hub.{made.run_id}.heterorl")]
    async with (
        serving(made, every_service) as hub,
        grpc.aio.secure_channel(hub.address, credentials, options) as channel,
    ):
        with pytest.raises(ConnectionLost, match="UNAVAILABLE"), classified():
            await invoke(channel, MANIFEST)


async def test_a_caller_without_tls_is_not_understood(made: MadeRun) -> None:
    async with (
        serving(made, every_service) as hub,
        dial(hub.address, made.sampler.peer, purpose=Purpose.CONTROL, now=0) as channel,
    ):
        with pytest.raises(ConnectionLost), classified():
            await invoke(channel, MANIFEST)


async def test_what_is_for_members_is_refused_on_the_port_for_strangers(made: MadeRun) -> None:
    async with (
        serving(made, every_service, audience=Audience.STRANGERS) as hub,
        channel_of(made.sampler, hub.address) as channel,
    ):
        for path in MEMBERS_ONLY:
            assert (await refusal_of(channel, path)).reason is Reason.UNAUTHENTICATED


async def test_a_certificate_that_expires_while_connected_is_refused_at_the_next_rpc(made: MadeRun) -> None:
    clock = ManualClock(now=made.made_at_s)
    async with (
        serving(made, every_service, clock=clock) as hub,
        channel_of(made.sampler, hub.address) as channel,
    ):
        assert await invoke(channel, MANIFEST) == [b""]
        clock.advance(AUTHORITY_LIFETIME_S)
        refused = await refusal_of(channel, MANIFEST)
        # Not final: the hub's clock may be wrong. It says the time, so that its caller can tell.
        assert (refused.reason, "expired" in str(refused)) == (Reason.EXPIRED, True)
        assert refused.hub_now_s == pytest.approx(clock.now(), abs=0.01)


async def test_a_revoked_node_is_refused_at_its_next_rpc_and_its_neighbour_is_not(made: MadeRun) -> None:
    async with (
        serving(made, every_service) as hub,
        channel_of(made.sampler, hub.address) as channel,
        channel_of(made.other_sampler, hub.address) as neighbours_channel,
    ):
        assert await invoke(channel, MANIFEST) == [b""]
        hub.revoked.add(made.sampler.node_id)
        refused = await refusal_of(channel, MANIFEST)
        assert (refused.reason, "revoked" in str(refused)) == (Reason.REVOKED, True)
        assert await invoke(neighbours_channel, MANIFEST) == [b""]


async def test_with_tls_off_the_name_a_caller_gives_decides_its_role(made: MadeRun) -> None:
    async with serving(made, every_service, tls=False) as hub:
        for role in Role:
            caller = Peer(made.run_id, role, "someone")
            async with dial(hub.address, caller, purpose=Purpose.CONTROL, now=0) as channel:
                if role is Role.SAMPLER:
                    assert await invoke(channel, LEASE) == [b""]
                else:
                    assert (await refusal_of(channel, LEASE)).reason is Reason.WRONG_ROLE


async def test_with_tls_off_a_caller_of_another_run_or_without_a_name_is_refused(made: MadeRun) -> None:
    path = "/heterorl.v1.MembershipService/GetStatus"
    async with serving(made, every_service, tls=False) as hub:
        stranger = Peer("another-run", Role.SAMPLER, "s1")
        async with dial(hub.address, stranger, purpose=Purpose.CONTROL, now=0) as channel:
            assert (await refusal_of(channel, path)).reason is Reason.FOREIGN_RUN
        async with grpc.aio.insecure_channel(hub.address) as channel:
            assert (await refusal_of(channel, path)).reason is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("role", list(Role))
async def test_a_hub_is_trusted_in_its_own_role_and_in_no_other(made: MadeRun, role: Role) -> None:
    async with serving(made, every_service, identity=made.of(role)) as hub:
        for dialled in (Role.COORDINATOR, Role.RELAY):
            async with dial(
                hub.address, made.sampler, purpose=Purpose.CONTROL, now=made.made_at_s, server=dialled
            ) as channel:
                if role is dialled:
                    assert await invoke(channel, MANIFEST) == [b""]
                else:
                    with pytest.raises(ConnectionLost, match="not a hub of this run"), classified():
                        await invoke(channel, MANIFEST)


async def test_the_hub_of_another_run_is_not_trusted_even_under_the_same_name(
    made: MadeRun, tmp_path: Path
) -> None:
    twin = make_run(tmp_path / "twin", now=time.time())
    async with serving(twin, every_service) as hub, channel_of(made.sampler, hub.address) as channel:
        with pytest.raises(ConnectionLost, match="not a hub of this run"), classified():
            await invoke(channel, MANIFEST)


def test_an_expired_node_is_told_so_before_it_dials(made: MadeRun) -> None:
    with pytest.raises(StartupError, match=r"expired at .*heterorl-node token"):
        dial("127.0.0.1:1", made.expired, purpose=Purpose.CONTROL, now=made.made_at_s)
