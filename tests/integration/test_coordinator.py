"""A real coordinator, real TLS, a real ledger: what peers are told, and what outlives a restart."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from heterorl.v1 import common_pb2, membership_pb2, rollout_pb2
from node.errors import StartupError
from node.rollout import EncodedGroup
from node.wire.rollouts import group_to_wire
from support.groups import make_completion
from support.hub import (
    RunningHub,
    answer_to,
    first_answer,
    joined,
    members,
    reason,
    running_hub,
    step_record,
    submission,
)
from support.identity import MadeRun, make_run
from support.waiting import eventually
from support.weights import Learner

SPOOLED = common_pb2.VERDICT_SPOOLED
ACCEPTED = common_pb2.VERDICT_ACCEPTED
STALE = common_pb2.VERDICT_STALE
DUPLICATE = common_pb2.VERDICT_DUPLICATE
FOREIGN = common_pb2.VERDICT_FOREIGN
MALFORMED = common_pb2.VERDICT_MALFORMED
TRAINED = common_pb2.VERDICT_TRAINED


async def test_a_group_goes_from_lease_to_gradient_step_and_its_sampler_hears_of_it(hub: RunningHub) -> None:
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        settings = await learner.join()
        assert (settings.task, settings.group_size, settings.batch_groups) == ("addition", 2, 2)
        await sampler.join()
        drain = await learner.drain(credits=1)
        (lease,) = (await sampler.lease()).leases
        assert (await sampler.submit(lease)).verdict == SPOOLED
        delivered = (await drain.hear()).group
        assert (delivered.group_id, delivered.sampler_id) == (lease.lease_id, "sampler-1")
        await drain.judge(lease.lease_id, ACCEPTED)
        await drain.step(1, lease.lease_id)
        assert await drain.acknowledgement() == 1
        # A stream that is cut after its first answer: whether that arrived nobody knows.
        for _ in range(2):
            told = await sampler.heartbeat()
            assert [(v.group_id, v.verdict) for v in told.verdicts] == [("0.1", ACCEPTED), ("0.1", TRAINED)]
        status = await sampler.status()
        assert dict(status.verdicts) == {"spooled": 1, "accepted": 1, "trained": 1}
        assert status.slots["trained"] == 1
        (row,) = [peer for peer in status.peers if peer.node_id == "sampler-1"]
        assert (row.verdicts["trained"], row.staleness_mean_versions, row.joins) == (1, 1.0, 1)
        assert hub.metric("heterorl_coordinator_groups_total", verdict="trained") == 1
        assert hub.metric("heterorl_coordinator_group_staleness_versions_sum") == 1


async def test_a_group_is_delivered_as_far_as_credits_go_and_once_on_a_stream(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        for lease in (await sampler.lease(4)).leases:
            await sampler.submit(lease)
        drain = await learner.drain(credits=2)
        assert [await drain.group(), await drain.group()] == ["0.1", "1.1"]
        await drain.say(credit=rollout_pb2.DrainCredit(groups=1))
        assert await drain.group() == "2.1"
        assert await drain.hears_nothing()


async def test_what_was_not_trained_on_is_delivered_again_unless_the_learner_holds_it(
    hub: RunningHub,
) -> None:
    async with members(hub) as (learner, sampler):
        for lease in (await sampler.lease(4)).leases:
            await sampler.submit(lease)
        drain = await learner.drain(credits=4)
        for _ in range(4):
            await drain.judge(await drain.group(), ACCEPTED)
        await drain.step(1, "0.1")
        assert await drain.acknowledgement() == 1
        drain.stream.cancel()
        again = await learner.drain(
            credits=4, version=2, held_group_ids=["2.1"], steps=[step_record(1, "0.1"), step_record(2, "1.1")]
        )
        assert await again.acknowledgement() == 2
        assert await again.group() == "3.1"
        assert await again.hears_nothing()


async def test_a_verdict_said_twice_is_counted_and_told_once(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        for lease in (await sampler.lease(2)).leases:
            await sampler.submit(lease)
        drain = await learner.drain(credits=2)
        for group_id, verdict in ((await drain.group(), ACCEPTED), (await drain.group(), STALE)):
            await drain.judge(group_id, verdict)
            await drain.judge(group_id, verdict)
        await drain.step(1, "0.1")
        await drain.step(1, "0.1")
        await drain.judge("0.1", ACCEPTED)
        assert await drain.acknowledgement() == 1
        await drain.say(step=step_record(2))
        while await drain.acknowledgement() != 2:
            pass
        told = [(v.group_id, v.verdict) for v in (await sampler.heartbeat()).verdicts]
        assert told == [("0.1", ACCEPTED), ("1.1", STALE), ("0.1", TRAINED)]
        assert dict((await sampler.status()).verdicts) == {
            "spooled": 2, "accepted": 1, "stale": 1, "trained": 1
        }  # fmt: skip
        for name in ("accepted", "stale", "trained"):
            assert hub.metric("heterorl_coordinator_groups_total", verdict=name) == 1


async def test_a_verdict_that_answered_a_submission_is_not_told_again_by_a_heartbeat(hub: RunningHub) -> None:
    async with members(hub) as (_learner, sampler):
        first, second = (await sampler.lease(2)).leases
        assert (await sampler.submit(first, layout_digest=b"other layout....")).verdict == FOREIGN
        assert (await sampler.submit(second)).verdict == SPOOLED
        assert (await sampler.submit(second)).verdict == DUPLICATE
        assert (await sampler.heartbeat()).verdicts == []


async def test_a_new_stream_of_the_learner_ends_the_one_before(hub: RunningHub) -> None:
    async with hub.peer() as learner:
        await learner.join()
        first = await learner.drain(version=1, steps=[step_record(1)])
        assert await first.acknowledgement() == 1  # it is open
        await learner.drain(version=1)
        assert await reason(first.stream.read()) == "fenced"


async def test_a_newer_learner_fences_the_older_everywhere(hub: RunningHub) -> None:
    newer = hub.made.issue(hub.made.learner.role, "learner-2")
    async with hub.peer() as old, hub.peer(newer) as new:
        await old.join()
        drain = await old.drain()
        assert await reason(new.join(learner_epoch=1)) == "fenced"
        await new.join(learner_epoch=2)
        assert await reason(drain.stream.read()) == "fenced"
        assert await reason(old.join(learner_epoch=1)) == "fenced"
        assert (
            await reason(first_answer(old.membership.Heartbeat, membership_pb2.HeartbeatRequest()))
            == "fenced"
        )
        assert await reason((await old.drain()).stream.read()) == "fenced"
        await new.drain(learner_epoch=2)


async def test_a_learner_restored_from_an_old_checkpoint_is_refused(hub: RunningHub) -> None:
    async with hub.peer() as learner:
        await learner.join()
        drain = await learner.drain()
        for version in (1, 2):
            await drain.step(version)
            assert await drain.acknowledgement() == version
        assert await reason((await learner.drain(version=1)).stream.read()) == "rollback"
        # Who was refused has ended nobody's stream.
        await drain.step(3)
        assert await drain.acknowledgement() == 3


@pytest.mark.parametrize(
    "message",
    [
        {"credit": rollout_pb2.DrainCredit(groups=0)},
        {"credit": rollout_pb2.DrainCredit(groups=-1)},
        {"credit": rollout_pb2.DrainCredit(groups=2**31 - 1)},
        {"judgement": rollout_pb2.GroupJudgement(group_id="x", verdict=ACCEPTED)},
        {"judgement": rollout_pb2.GroupJudgement(group_id="0.1", verdict=TRAINED)},
        {"judgement": rollout_pb2.GroupJudgement(group_id="0.1")},
        {"step": rollout_pb2.StepRecord(version=1, group_ids=["0.1"])},
        {"step": rollout_pb2.StepRecord(version=0)},
        {"hello": rollout_pb2.DrainHello(learner_epoch=1)},
        {},
    ],
)
async def test_a_message_that_makes_no_sense_ends_the_drain_stream(
    hub: RunningHub, message: dict[str, object]
) -> None:
    async with hub.peer() as learner:
        await learner.join()
        drain = await learner.drain()
        await drain.say(**message)
        assert await reason(drain.stream.read()) == "malformed"


async def test_a_drain_stream_begins_with_a_hello(hub: RunningHub) -> None:
    async with hub.peer() as learner:
        await learner.join()
        credit = rollout_pb2.DrainRolloutsRequest(credit=rollout_pb2.DrainCredit(groups=1))
        assert await reason(first_answer(learner.rollout.DrainRollouts, credit)) == "malformed"


@pytest.mark.parametrize("max_leases", [0, -1, 257])
async def test_a_request_for_an_impossible_number_of_leases_is_refused(
    hub: RunningHub, max_leases: int
) -> None:
    async with hub.peer(hub.made.sampler) as sampler:
        await sampler.join()
        assert await reason(sampler.lease(max_leases)) == "malformed"


async def test_a_group_that_cannot_be_read_has_a_verdict_and_its_prompt_goes_on(hub: RunningHub) -> None:
    async with members(hub) as (_learner, sampler):
        (lease,) = (await sampler.lease()).leases
        header = rollout_pb2.GroupHeader(run_id=hub.made.run_id, group_id=lease.lease_id)
        group = EncodedGroup(header.SerializeToString(), b"")
        answer = await sampler.hand_in(submission(group, group_id=lease.lease_id))
        assert (answer.verdict, "sampling parameters" in answer.detail) == (MALFORMED, True)
        assert (await sampler.lease()).leases[0].lease_id == "0.2"
        assert (await sampler.status()).verdicts == {"malformed": 1}


async def test_bytes_that_no_field_holds_are_neither_stored_nor_read_beyond_the_largest_group(
    hub: RunningHub,
) -> None:
    ledger = hub.made.directory / "coordinator" / "ledger.sqlite"
    async with members(hub) as (_learner, sampler):
        leases = (await sampler.lease(3)).leases

        def padded(lease: rollout_pb2.PromptLease, mebibytes: int) -> rollout_pb2.SubmitRolloutsRequest:
            group = group_to_wire(answer_to(lease, run_id=hub.made.run_id))
            unknown = b"x" * (mebibytes << 20)
            field_999 = b"\xba\x3e" + encoded_length(len(unknown)) + unknown
            padded = replace(group, header=group.header + field_999)
            return submission(padded, group_id=lease.lease_id)

        def written_bytes() -> int:
            return sum(file.stat().st_size for file in ledger.parent.glob("ledger.sqlite*"))

        before = written_bytes()
        for lease in leases:
            answer = await sampler.hand_in(padded(lease, 1))
            assert (answer.verdict, "allowed are 8192" in answer.detail) == (MALFORMED, True)
        answer = await sampler.hand_in(padded(leases[0], 5))
        assert (answer.verdict, answer.reason) == (common_pb2.VERDICT_UNSPECIFIED, "over_limit")
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # by gRPC, before it is received
            await sampler.hand_in(padded(leases[0], 60))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert written_bytes() - before < 1 << 20


def encoded_length(size: int) -> bytes:
    """Return a length as protobuf writes it: seven bits a byte, the lowest first."""
    low, rest = size & 0x7F, size >> 7
    return bytes([low | 0x80]) + encoded_length(rest) if rest else bytes([low])


async def test_an_uploaded_version_is_announced_and_its_groups_are_no_longer_foreign(hub: RunningHub) -> None:
    made = hub.made
    weights = Learner(run_id=made.run_id, key=made.signing_key)
    async with members(hub) as (learner, sampler):
        first, second = (await sampler.lease(2)).leases
        completions = (make_completion(version=1),) * 2
        refused = await sampler.submit(first, completions=completions)
        assert (refused.verdict, refused.detail) == (FOREIGN, "version 1 was never published")
        await learner.publish(*weights.signed(1, None))
        assert (await sampler.submit(second, completions=completions)).verdict == SPOOLED
        root = weights.versions[1].version.root
        told = await sampler.heartbeat()
        assert (told.head.number, told.head.root, told.must_repair) == (1, root, False)

        async def is_logged() -> bool:
            wrong = common_pb2.PolicyVersion(number=1, root=b"x" * 16)
            return (await sampler.heartbeat(held=wrong)).must_repair

        await eventually(is_logged)
        hub.clock.advance(5)
        await sampler.heartbeat(held=common_pb2.PolicyVersion(number=0))
        (row,) = [peer for peer in (await sampler.status()).peers if peer.node_id == "sampler-1"]
        assert (row.version_lag_versions, row.lag_s) == (1, 5.0)


async def test_leases_given_back_are_leased_at_once(hub: RunningHub) -> None:
    async with members(hub) as (_learner, sampler):
        leases = [lease.lease_id for lease in (await sampler.lease(2)).leases]
        request = rollout_pb2.ReleaseLeasesRequest(lease_ids=[*leases, "99.1", "junk"])
        assert (await sampler.rollout.ReleaseLeases(request)).released == 2
        assert [lease.lease_id for lease in (await sampler.lease(3)).leases] == ["0.2", "1.2", "2.1"]


async def test_everything_told_before_a_restart_is_true_after_it(made: MadeRun) -> None:
    async with joined(made) as (hub, learner, sampler):
        trained, spooled, running, lost = (await sampler.lease(4)).leases
        for lease in (trained, spooled, lost):
            await sampler.submit(lease)
        drain = await learner.drain(credits=9)
        await drain.judge(lost.lease_id, STALE)
        await drain.step(1, trained.lease_id)
        while (await drain.hear()).WhichOneof("message") != "step_acknowledged":
            pass
        before = await sampler.status()
    async with running_hub(made) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        after = await sampler.status()
        assert (after.slots, after.verdicts) == (before.slots, before.verdicts)
        assert after.learner_epoch == before.learner_epoch
        assert hub.metric("heterorl_coordinator_groups_total", verdict="stale") == 1
        assert await reason(sampler.lease()) == "not_joined"
        await learner.join(held=common_pb2.PolicyVersion(number=1))
        await sampler.join()
        assert [(await sampler.submit(lease)).verdict for lease in (trained, spooled)] == [DUPLICATE] * 2
        assert list((await sampler.heartbeat(running.lease_id)).lost_lease_ids) == []
        assert (await sampler.submit(running)).verdict == SPOOLED
        # Nothing new before the learner has said that the ledger is whole.
        assert (await sampler.lease()).waits_for == "learner"
        drain = await learner.drain(credits=9, version=1, steps=[step_record(1, trained.lease_id)])
        assert await drain.acknowledgement() == 1
        assert (await sampler.lease()).leases[0].lease_id == "3.2"
        assert {await drain.group(), await drain.group()} == {spooled.lease_id, running.lease_id}
        assert await drain.hears_nothing()


async def test_a_ledger_that_was_lost_is_not_begun_anew_beside_what_was_published(made: MadeRun) -> None:
    weights = Learner(run_id=made.run_id, key=made.signing_key)
    async with running_hub(made) as hub, hub.peer() as learner:
        await learner.join()
        await learner.publish(*weights.signed(1, None))
    (made.directory / "coordinator" / "ledger.sqlite").unlink()
    with pytest.raises(StartupError, match=r"version 1 was published.*backup"):
        async with running_hub(made):
            pass


async def test_a_stopping_coordinator_says_so_to_every_open_stream(hub: RunningHub) -> None:
    async with hub.peer() as learner:
        await learner.join()
        drain = await learner.drain()
        heartbeats = learner.membership.Heartbeat()
        await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=1))
        await heartbeats.read()
        hub.stopping.set()
        assert await reason(drain.stream.read()) == "draining"
        assert await reason(heartbeats.read()) == "draining"
        async with asyncio.timeout(5):
            await asyncio.wait({hub.running})


async def test_a_port_that_is_taken_stops_the_start_and_frees_the_ledger(
    hub: RunningHub, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other", now=time.time(), run_id="other")
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="cannot listen"), flatten_subgroups=True):
        async with running_hub(other, listen=hub.address):
            pass
    async with running_hub(other):
        pass
