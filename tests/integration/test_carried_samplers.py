"""Samplers behind a relay: they join, lease, submit and hear verdicts without reaching the coordinator."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from heterorl.v1 import common_pb2, membership_pb2, relay_pb2, relay_pb2_grpc, rollout_pb2
from node.coordinator import carried_samplers
from node.errors import Reason
from node.identity.identity_store import Identity
from node.identity.relay_voucher import VOUCHER_S, RelayVoucher, vouch
from node.rpc.channel import Purpose, dial
from node.run import Role
from node.serving import heartbeat_pause
from node.wire.mapping import role_to_wire, to_wire
from sampler.engines.torch_engine import TorchEngine
from support.hub import LAYOUT, TIMEOUT_S, TOKENIZER, HandPeer, joined, reason, running_hub
from support.identity import MadeRun
from support.relay import RunningRelay, running_relay
from support.sampler import learner_of, learning, sampling
from support.waiting import eventually, until

SPOOLED = common_pb2.VERDICT_SPOOLED
INSTANCE = "first"


async def joins(peer: HandPeer, relay_id: str = "relay-1", **changes: Any) -> membership_pb2.JoinResponse:
    """Join by a relay, as a sampler does: once for its name, once with a voucher."""
    first = await peer.join(instance=INSTANCE)
    assert (first.relay_id, first.task) == (relay_id, "")
    voucher = vouch(peer.identity, first.relay_id, instance=INSTANCE, now=time.time())
    wire = to_wire(membership_pb2.RelayVoucher, voucher)
    return await peer.join(**({"instance": INSTANCE, "voucher": wire} | changes))


def by(relay: RunningRelay, sampler: Identity | None = None) -> HandPeer:
    identity = sampler or relay.made.sampler
    return HandPeer(identity, dial(relay.address, identity, purpose=Purpose.ROLLOUTS, now=time.time()))


async def row(peer: HandPeer, node_id: str = "sampler-1") -> membership_pb2.PeerStatus:
    """Return a sampler's row of the status."""
    (found,) = (one for one in (await peer.status()).peers if one.node_id == node_id)
    return found


@asynccontextmanager
async def behind_a_relay(made: MadeRun, directory: Path) -> AsyncIterator[tuple[Any, ...]]:
    async with (
        running_hub(made) as hub,
        running_relay(made, directory, coordinator=hub.address) as relay,
        hub.peer() as learner,
    ):
        await learner.join()
        sampler = by(relay)
        await joins(sampler)
        yield hub, relay, learner, sampler


async def test_a_sampler_that_reaches_only_a_relay_joins_leases_submits_and_hears_a_verdict(
    made: MadeRun, tmp_path: Path
) -> None:
    async with behind_a_relay(made, tmp_path / "relay") as (_, relay, learner, sampler):
        drain = await learner.drain(credits=1)
        (lease,) = (await sampler.lease()).leases
        await sampler.heartbeat(lease.lease_id, instance=INSTANCE, waits_for="grader")

        async def is_reported() -> bool:
            found = await row(learner)
            return (found.via, found.waits_for, found.leases) == ("relay-1", "grader", 1)

        await eventually(is_reported)
        assert (await sampler.submit(lease)).verdict == SPOOLED
        assert await drain.group() == lease.lease_id
        await drain.judge(lease.lease_id, common_pb2.VERDICT_ACCEPTED)
        heard: list[str] = []

        async def hears_of_it() -> bool:
            answer = await sampler.heartbeat(instance=INSTANCE)
            heard.extend(one.group_id for one in answer.verdicts)
            return lease.lease_id in heard

        await eventually(hears_of_it)
        assert relay.registry.value("heterorl_relay_samplers") == 1


async def test_leases_named_by_relay_are_renewed_and_those_lost_or_released_are_told(
    made: MadeRun, tmp_path: Path
) -> None:
    async with behind_a_relay(made, tmp_path / "relay") as (hub, _relay, learner, sampler):
        kept, released = (await sampler.lease(2)).leases
        answer = await sampler.rollout.ReleaseLeases(
            rollout_pb2.ReleaseLeasesRequest(lease_ids=[released.lease_id]), timeout=TIMEOUT_S
        )
        assert answer.released == 1
        for _ in range(3):
            hub.clock.advance(40.0)  # of a term of 60

            async def is_heard() -> bool:
                await sampler.heartbeat(kept.lease_id, instance=INSTANCE)
                return (await row(learner)).last_seen_s < 30

            await eventually(is_heard)
        assert (await row(learner)).leases == 1
        lost: set[str] = set()

        async def hears_of_the_lost() -> bool:
            answer = await sampler.heartbeat(kept.lease_id, released.lease_id, instance=INSTANCE)
            lost.update(answer.lost_lease_ids)
            return bool(lost)

        await eventually(hears_of_the_lost)
        assert lost == {released.lease_id}


async def test_a_sampler_that_leaves_a_relay_has_left_the_run_and_its_place_is_free(
    made: MadeRun, tmp_path: Path
) -> None:
    async with behind_a_relay(made, tmp_path / "relay") as (_, relay, learner, sampler):
        stream = sampler.membership.Heartbeat(timeout=TIMEOUT_S)
        await stream.write(membership_pb2.HeartbeatRequest(sequence=1, instance=INSTANCE))
        await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF

        async def has_left() -> bool:
            return (await row(learner)).state == "left"

        await eventually(has_left)
        assert relay.registry.value("heterorl_relay_samplers") == 0
        assert await reason(sampler.rollout.LeasePrompts(rollout_pb2.LeasePromptsRequest(max_leases=1))) == (
            Reason.NOT_JOINED
        )


async def test_another_process_of_the_name_waits_until_the_first_is_cut_off(
    made: MadeRun, tmp_path: Path
) -> None:
    async with behind_a_relay(made, tmp_path / "relay") as (_, relay, learner, sampler):
        stream = sampler.membership.Heartbeat(timeout=TIMEOUT_S)
        await stream.write(membership_pb2.HeartbeatRequest(sequence=1, instance=INSTANCE))
        await stream.read()

        async def is_live() -> bool:
            return (await row(learner)).state == "live"

        await eventually(is_live)
        twin = by(relay)
        wire = to_wire(
            membership_pb2.RelayVoucher, vouch(made.sampler, "relay-1", instance="second", now=time.time())
        )
        assert await reason(twin.join(instance="second", voucher=wire)) == Reason.NAME_IN_USE
        stream.cancel()

        async def takes_over() -> bool:
            try:
                await twin.join(instance="second", voucher=wire)
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually(takes_over)
        assert await reason(sampler.heartbeat(instance=INSTANCE)) == Reason.NOT_JOINED


async def test_a_sampler_that_joins_again_and_again_takes_one_place_at_its_relay(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried_samplers, "CARRIED_SESSIONS", 2)
    async with behind_a_relay(made, tmp_path / "relay") as (_, relay, learner, sampler):
        for _ in range(4):
            await joins(sampler)
        assert (await row(learner)).via == "relay-1"
        other = by(relay, made.other_sampler)
        await joins(other)


async def test_a_request_that_is_too_large_is_refused_to_its_sampler_and_ends_no_other_session(
    made: MadeRun, tmp_path: Path
) -> None:
    async with behind_a_relay(made, tmp_path / "relay") as (_, relay, _learner, sampler):
        other = by(relay, made.other_sampler)
        await joins(other)
        lease_ids = ["x" * 4096] * 4096
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await sampler.rollout.ReleaseLeases(
                rollout_pb2.ReleaseLeasesRequest(lease_ids=lease_ids), timeout=TIMEOUT_S
            )
        assert "hands up at most" in str(refused.value.details())
        await asyncio.gather(
            *(
                sampler.rollout.ReleaseLeases(
                    rollout_pb2.ReleaseLeasesRequest(lease_ids=["x" * 1024] * 4096), timeout=TIMEOUT_S
                )
                for _ in range(4)
            )
        )  # 16 MiB together, twice what one message may have
        await other.heartbeat(instance=INSTANCE)
        assert len((await other.lease()).leases) == 1


async def test_a_pause_between_requests_for_leases_grows_with_the_fleet(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_pause, "HEARTBEATS_PER_S", 0.2)
    async with running_hub(made, lease_ttl_s=60.0) as hub, hub.peer(made.sampler) as sampler:
        await sampler.join()
        answer = await sampler.lease()
        assert (answer.waits_for, len(answer.leases)) == ("learner", 0)
        assert 4.0 <= answer.retry_after_s <= 6.0  # 5, of one peer


async def test_a_sampler_that_comes_to_the_coordinator_itself_is_not_the_relays_any_more(
    made: MadeRun, tmp_path: Path
) -> None:
    async with behind_a_relay(made, tmp_path / "relay") as (hub, _relay, learner, sampler):
        (lease,) = (await sampler.lease()).leases
        async with hub.peer(made.sampler) as direct:
            await direct.join(instance=INSTANCE)
            answer = await direct.heartbeat(lease.lease_id, instance=INSTANCE)
            assert not answer.lost_lease_ids
            assert (await row(learner)).via == ""
            request = rollout_pb2.LeasePromptsRequest(max_leases=1, held=sampler.held)
            assert await reason(sampler.rollout.LeasePrompts(request)) == Reason.NOT_JOINED


async def test_a_relay_that_goes_and_comes_back_loses_and_doubles_no_group(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(running_hub(made, max_staleness_versions=40))
        learner = await stack.enter_async_context(learning(hub, base, model_dir))
        drain = await learner.drain(credits=1000)
        delivered: list[str] = []

        def slots() -> list[int]:
            return [int(name.split(".")[0]) for name in delivered]

        async def accept(*, until: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not until():
                    response = await drain.hear()
                    if response.WhichOneof("message") == "group":
                        delivered.append(response.group.group_id)
                        await drain.judge(response.group.group_id, common_pb2.VERDICT_ACCEPTED)

        async with running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay:
            listen = relay.address
            sampler = await stack.enter_async_context(sampling(made, None, model_dir, relays=(listen,)))
            await accept(until=lambda: len(delivered) >= 4)
            assert (await row(learner)).via == "relay-1"
        await stack.enter_async_context(
            running_relay(made, tmp_path / "relay", coordinator=hub.address, listen=listen)
        )
        # Some of the first six wait in the sampler, for seconds, before they are submitted again.
        await accept(until=lambda: len(delivered) >= 12 and set(range(6)) <= set(slots()))
        assert len(slots()) == len(set(slots()))
        assert (await row(learner)).via == "relay-1"
        assert sampler.value("groups_total", verdict="foreign") == 0


async def test_versions_reach_a_sampler_that_has_only_a_relay(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path
) -> None:
    async with (
        running_hub(made) as hub,
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
        learning(hub, base, model_dir) as learner,
        sampling(made, None, model_dir, relays=(relay.address,)) as sampler,
    ):
        await until(lambda: sampler.value("groups_total", verdict="spooled") >= 1)
        await learner.publish(*learner_of(made, base).signed(1, None))
        await until(lambda: sampler.value("held_version") == 1)

        async def is_shown() -> bool:
            found = await row(learner)
            return (found.held.number, found.via) == (1, "relay-1")

        await eventually(is_shown)


async def test_a_sampler_whose_relay_is_away_goes_on_by_the_coordinator(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(running_hub(made))
        learner = await stack.enter_async_context(learning(hub, base, model_dir))
        async with running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay:
            sampler = await stack.enter_async_context(
                sampling(made, hub.address, model_dir, relays=(relay.address,))
            )

            async def is_via(name: str) -> bool:
                found = [one for one in (await learner.status()).peers if one.node_id == "sampler-1"]
                return bool(found) and (found[0].state, found[0].via) == ("live", name)

            await eventually(lambda: is_via("relay-1"))
        await eventually(lambda: is_via(""))
        before = sampler.value("groups_total", verdict="spooled")
        drain = await learner.drain(credits=100)
        for _ in range(3):
            await drain.judge(await drain.group(), common_pb2.VERDICT_STALE)
        await until(lambda: sampler.value("groups_total", verdict="spooled") > before)


# What a relay that lies can do: starve those it speaks for, hold leases up to their share, nothing else.


class LyingRelay:
    """A relay's stream to the coordinator, driven by hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stream = relay_pb2_grpc.RelayServiceStub(channel).Carry(timeout=TIMEOUT_S)
        self._number = 0

    async def ask(self, session: int = 1, **request: Any) -> relay_pb2.CarriedAnswer:
        self._number += 1
        carried = relay_pb2.CarriedRequest(number=self._number, session=session, **request)
        await self.stream.write(relay_pb2.CarryRequest(requests=[carried]))
        response = await self.stream.read()
        assert isinstance(response, relay_pb2.CarryResponse), response
        (answer,) = response.answers
        return answer

    async def join(self, voucher: RelayVoucher, *, instance: str = INSTANCE) -> str:
        """Present a voucher; return why it is refused, or an empty text."""
        join = membership_pb2.JoinRequest(
            run_id="example",
            role=role_to_wire(Role.SAMPLER),
            layout_digest=LAYOUT,
            tokenizer_digest=TOKENIZER,
            instance=instance,
            voucher=to_wire(membership_pb2.RelayVoucher, voucher),
        )
        return (await self.ask(join=join)).refused.reason

    async def lease(self, wanted: int = 1) -> relay_pb2.CarriedAnswer:
        held = common_pb2.PolicyVersion()
        return await self.ask(lease=rollout_pb2.LeasePromptsRequest(max_leases=wanted, held=held))


@asynccontextmanager
async def lying(made: MadeRun, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    async with (
        joined(made, **settings) as (hub, learner, _sampler),
        dial(hub.address, made.relay, purpose=Purpose.CARRIED, now=time.time()) as channel,
    ):
        yield hub, learner, LyingRelay(channel), channel


async def test_a_relay_speaks_for_nobody_by_a_voucher_that_is_not_for_it_forged_or_expired(
    made: MadeRun,
) -> None:
    now = time.time()
    good = vouch(made.other_sampler, "relay-1", instance=INSTANCE, now=now)
    async with lying(made) as (_hub, _learner, relay, _):
        for voucher, why in (
            (replace(good, relay_id="relay-2"), Reason.BAD_SIGNATURE),
            (vouch(made.other_sampler, "relay-2", instance=INSTANCE, now=now), Reason.BAD_SIGNATURE),
            (
                replace(vouch(made.other_sampler, "relay-2", instance=INSTANCE, now=now), relay_id="relay-1"),
                Reason.BAD_SIGNATURE,
            ),
            (replace(good, not_after_s=good.not_after_s + 60), Reason.BAD_SIGNATURE),
            (replace(good, sampler_id="sampler-1"), Reason.BAD_SIGNATURE),
            (replace(good, signature=b""), Reason.BAD_SIGNATURE),
            (replace(good, certificate=b""), Reason.BAD_SIGNATURE),
            (vouch(made.foreign, "relay-1", instance=INSTANCE, now=now), Reason.BAD_SIGNATURE),
            (vouch(made.relay, "relay-1", instance=INSTANCE, now=now), Reason.BAD_SIGNATURE),
            (vouch(made.other_sampler, "relay-1", instance="other", now=now), Reason.BAD_SIGNATURE),
            (
                vouch(made.other_sampler, "relay-1", instance=INSTANCE, now=now + 2 * VOUCHER_S),
                Reason.BAD_SIGNATURE,
            ),
            (
                vouch(made.other_sampler, "relay-1", instance=INSTANCE, now=now - VOUCHER_S - 1),
                Reason.NOT_JOINED,
            ),
        ):
            assert await relay.join(voucher) == why, voucher
            assert (await relay.lease()).refused.reason == Reason.NOT_JOINED
        assert await relay.join(good, instance=f"{INSTANCE}\0") == Reason.BAD_SIGNATURE  # another process
        assert await relay.join(good) == ""


async def test_a_voucher_that_expires_and_a_sampler_that_is_revoked_end_a_session(made: MadeRun) -> None:
    async with lying(made) as (hub, _learner, relay, _):
        voucher = vouch(made.other_sampler, "relay-1", instance=INSTANCE, now=time.time())
        assert await relay.join(voucher) == ""
        assert len((await relay.lease()).leased.leases) == 1
        hub.clock.advance(VOUCHER_S + 60)
        assert (await relay.lease()).refused.reason == Reason.NOT_JOINED
        fresh = vouch(made.other_sampler, "relay-1", instance=INSTANCE, now=hub.clock.now())
        assert await relay.join(fresh) == ""
        (made.directory / "coordinator" / "revoked").write_text("sampler-2\n")
        try:
            assert (await relay.lease()).refused.reason == Reason.REVOKED
            assert await relay.join(fresh) == Reason.REVOKED
        finally:
            (made.directory / "coordinator" / "revoked").unlink()


async def test_a_relay_that_is_revoked_speaks_for_nobody(made: MadeRun) -> None:
    async with lying(made) as (_hub, _learner, relay, channel):
        voucher = vouch(made.other_sampler, "relay-1", instance=INSTANCE, now=time.time())
        assert await relay.join(voucher) == ""
        (made.directory / "coordinator" / "revoked").write_text("relay-1\n")
        try:
            assert await relay.stream.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await LyingRelay(channel).stream.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            (made.directory / "coordinator" / "revoked").unlink()


async def test_a_relay_holds_no_more_leases_than_the_share_of_those_it_speaks_for(made: MadeRun) -> None:
    async with lying(made, lease_ttl_s=600.0) as (_hub, learner, relay, _):
        voucher = vouch(made.other_sampler, "relay-1", instance=INSTANCE, now=time.time())
        assert await relay.join(voucher) == ""
        for _ in range(20):
            await relay.lease(256)
        found = await row(learner, "sampler-2")
        assert 0 < found.leases <= found.lease_allowance
        assert (await relay.lease(1)).leased.waits_for in ("share", "concurrency", "staleness", "buffer")
