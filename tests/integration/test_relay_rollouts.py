"""Groups handed in at a relay: on its disk first, then at the coordinator, under their sampler's name."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from heterorl.v1 import common_pb2, rollout_pb2
from node.clients.submission_stream import SubmissionStream
from node.errors import Reason, RefusedError
from node.relay.forwarder import Forwarder
from node.relay.metrics import RelayMetrics
from node.relay.rollout_spool import RolloutSpool
from node.rollout import EncodedGroup
from node.rpc.channel import REASON_KEY, Purpose, dial
from node.run import Role
from node.wire.rollouts import group_to_wire, submission_to_wire
from support.full_disk import full_disk
from support.hub import HandPeer, answer_to, joined, running_hub, signed
from support.identity import MadeRun
from support.relay import RunningRelay, running_relay
from support.waiting import until

SPOOLED = common_pb2.VERDICT_SPOOLED


def at(relay: RunningRelay) -> HandPeer:
    """Return the sampler as it dials the relay."""
    sampler = relay.made.sampler
    channel = dial(relay.address, sampler, purpose=Purpose.ROLLOUTS, now=time.time())
    return HandPeer(sampler, channel)


async def reason_of(call: Awaitable[object]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return str(dict(error.value.trailing_metadata() or ())[REASON_KEY])


async def test_a_group_handed_in_at_a_relay_reaches_the_learner_under_its_samplers_name(
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        joined(made) as (hub, learner, sampler),
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
    ):
        drain = await learner.drain(credits=1)
        (lease,) = (await sampler.lease()).leases
        assert (await at(relay).submit(lease)).verdict == SPOOLED
        delivered = (await drain.hear()).group
        assert (delivered.group_id, delivered.sampler_id) == (lease.lease_id, "sampler-1")
        await until(lambda: relay.registry.value("heterorl_relay_spooled_groups") == 0)
        assert relay.registry.value("heterorl_relay_forwarded_groups_total", verdict="spooled") == 1


async def test_a_relay_keeps_groups_on_its_disk_while_the_coordinator_is_away_and_through_a_restart(
    made: MadeRun, tmp_path: Path
) -> None:
    async with joined(made) as (hub, learner, sampler):
        leases = (await sampler.lease(2)).leases
        address = hub.address
    async with running_relay(made, tmp_path / "relay", coordinator=address) as relay:
        for lease in leases:
            assert (await at(relay).submit(lease)).verdict == SPOOLED
        assert (await at(relay).submit(leases[0])).verdict == common_pb2.VERDICT_DUPLICATE
        assert relay.registry.value("heterorl_relay_spooled_groups") == 2
    async with running_relay(made, tmp_path / "relay", coordinator=address) as relay:
        assert relay.registry.value("heterorl_relay_spooled_groups") == 2
        async with running_hub(made, listen=address) as hub, hub.peer() as learner:
            await learner.join(learner_epoch=2)
            drain = await learner.drain(credits=2, learner_epoch=2)
            assert {await drain.group(), await drain.group()} == {lease.lease_id for lease in leases}


async def test_a_group_the_coordinator_does_not_want_is_told_to_its_sampler_in_a_heartbeat(
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        joined(made) as (hub, _learner, sampler),
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
    ):
        (lease,) = (await sampler.lease()).leases
        lease.lease_id = "99.1"
        assert (await at(relay).submit(lease)).verdict == SPOOLED
        await until(lambda: relay.registry.value("heterorl_relay_spooled_groups") == 0)
        (told,) = (await sampler.heartbeat()).verdicts
        assert (told.group_id, told.verdict) == ("99.1", common_pb2.VERDICT_FOREIGN)


async def test_a_relay_takes_nothing_that_its_sampler_has_not_signed_or_that_is_too_large(
    made: MadeRun, tmp_path: Path
) -> None:
    async with (
        running_hub(made) as hub,
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
    ):
        lease = rollout_pb2.PromptLease(lease_id="0.1", task="addition", group_size=2)
        lease.sampling.CopyFrom(
            common_pb2.SamplingParameters(temperature=1, top_p=1, top_k=0, max_new_tokens=8)
        )
        answer = answer_to(lease, run_id=made.run_id)
        altered = group_to_wire(answer).columns + b"x"
        for request, reason in (
            (signed(answer, made.sampler, signature=b""), Reason.BAD_SIGNATURE),
            (signed(answer, made.other_sampler), Reason.BAD_SIGNATURE),
            (
                signed(answer, made.sampler, columns=altered),
                Reason.BAD_SIGNATURE,
            ),
            (signed(EncodedGroup(b"", b"x" * (5 << 20)), made.sampler), Reason.OVER_LIMIT),
        ):
            assert (await at(relay).hand_in(request)).reason == reason
        assert relay.registry.value("heterorl_relay_spooled_groups") == 0


async def test_only_a_relay_speaks_for_others_and_it_must_say_for_whom(made: MadeRun, tmp_path: Path) -> None:
    async with running_hub(made) as hub:
        relay = made.issue(Role.RELAY, "relay-1")
        for identity, named, reason in (
            (made.sampler, "sampler-2", Reason.WRONG_ROLE),
            (relay, "", Reason.MALFORMED),
            (relay, "No Name", Reason.MALFORMED),
        ):
            async with hub.peer(identity) as peer:
                request = submission_to_wire(EncodedGroup(b"", b"", sampler_id=named))
                assert (await peer.hand_in(request)).reason == reason


async def test_a_relay_that_is_full_keeps_its_samplers_waiting(made: MadeRun, tmp_path: Path) -> None:
    async with joined(made) as (_hub, _learner, sampler):
        leases = (await sampler.lease(2)).leases
    async with running_relay(made, tmp_path / "relay", coordinator="127.0.0.1:1", spool_groups=1) as relay:
        assert (await at(relay).submit(leases[0])).verdict == SPOOLED
        request = signed(answer_to(leases[1], run_id=made.run_id), made.sampler)
        assert (await at(relay).hand_in(request)).reason == Reason.BUSY


async def test_a_relay_leases_nothing_to_whom_it_does_not_speak_for(made: MadeRun, tmp_path: Path) -> None:
    async with running_relay(made, tmp_path / "relay", coordinator="127.0.0.1:1") as relay:
        rollout = at(relay).rollout
        lease = rollout.LeasePrompts(rollout_pb2.LeasePromptsRequest(max_leases=1), timeout=10)
        assert await reason_of(lease) == Reason.NOT_JOINED


async def test_a_relay_cannot_submit_in_the_name_of_a_sampler_that_did_not_sign(
    made: MadeRun, tmp_path: Path
) -> None:
    async with joined(made) as (hub, _learner, sampler), hub.peer(made.relay) as relay:
        (lease,) = (await sampler.lease()).leases
        answer = answer_to(lease, run_id=made.run_id)
        altered = group_to_wire(answer_to(lease, run_id=made.run_id, prompt_index=99))
        for forged in (
            signed(answer, made.other_sampler, sampler_id="sampler-1"),
            signed(answer, made.relay, sampler_id="sampler-1"),
            signed(
                answer,
                made.sampler,
                sampler_id="sampler-1",
                header=altered.header,
                columns=altered.columns,
            ),
        ):
            assert (await relay.hand_in(forged)).reason == Reason.BAD_SIGNATURE
        refusals = {"service": "RolloutService", "reason": "bad_signature"}
        assert hub.metric("heterorl_node_refusals_total", **refusals) == 3
        assert (await sampler.heartbeat()).verdicts == []  # it hears nothing of groups that are not its own
        assert (await sampler.submit(lease)).verdict == SPOOLED


async def test_a_group_that_a_relay_took_in_before_its_sampler_was_revoked_is_not_trained_on(
    made: MadeRun, tmp_path: Path
) -> None:
    async with joined(made) as (hub, _learner, sampler), hub.peer(made.relay) as relay:
        (lease,) = (await sampler.lease()).leases
        request = signed(answer_to(lease, run_id=made.run_id), made.sampler, sampler_id="sampler-1")
        revoked = made.directory / "coordinator" / "revoked"
        revoked.write_text("sampler-1\n")
        answer = await relay.hand_in(request)
        assert (answer.verdict, answer.detail) == (common_pb2.VERDICT_FOREIGN, "sampler-1 was revoked")
        revoked.unlink()


async def test_groups_that_wait_for_a_relays_disk_share_a_commit_and_only_those_that_do_not_fit_are_refused(
    tmp_path: Path,
) -> None:
    commits = 0

    class Counting(RolloutSpool):
        @contextlib.contextmanager
        def one_commit(self) -> Iterator[None]:
            nonlocal commits
            commits += 1
            with super().one_commit():
                yield

    spool = Counting.open(tmp_path / "rollouts.sqlite", capacity_groups=3, capacity_bytes=1 << 20)
    stream = SubmissionStream(grpc.aio.insecure_channel("127.0.0.1:1"))
    metrics = RelayMetrics(CollectorRegistry())
    forwarder = Forwarder(spool, stream, metrics=metrics, random=lambda: 0.0)
    taking = (forwarder.take(EncodedGroup(b"", b"group", f"{n}.1", "s1")) for n in (0, 1, 1, 2, 3))
    taken = await asyncio.gather(*taking, return_exceptions=True)
    assert taken[:4] == [True, True, False, True]
    assert isinstance(taken[4], RefusedError)
    assert taken[4].reason is Reason.BUSY
    assert (commits, len(spool)) == (1, 3)
    with full_disk(1):
        lost = await asyncio.gather(
            forwarder.take(EncodedGroup(b"", bytes(99_999), "9.1", "s1")), return_exceptions=True
        )
    assert (isinstance(lost[0], RefusedError), len(spool)) == (True, 3)
    spool.close()
