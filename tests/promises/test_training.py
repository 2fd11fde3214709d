"""From the spool to a gradient step: what the learner's stream delivers, and what it may say."""

from typing import Any

import pytest

from heterorl.v1 import common_pb2, membership_pb2, rollout_pb2
from node.errors import Reason
from support.by_rpc import (
    ACCEPTED,
    DUPLICATE,
    STALE,
    TRAINED,
    UNINFORMATIVE,
    acknowledged,
    refusal_of,
    row_of,
    slots,
    spool,
    told,
    until_slots,
    verdicts,
)
from support.hub import RunningHub, first_answer, members, step_record


async def test_a_group_goes_from_lease_to_step_and_its_sampler_hears_of_it_until_it_has(
    hub: RunningHub,
) -> None:
    async with members(hub) as (learner, sampler):
        drain = await learner.drain(credits=1)
        (name,) = await spool(sampler, 1)
        group = (await drain.hear()).group
        assert (group.group_id, group.sampler_id) == (name, "sampler-1")
        await drain.judge(name, ACCEPTED)
        await drain.step(1, name)
        assert await drain.acknowledgement() == 1
        for _ in range(2):  # a stream that is cut after its first answer: whether it arrived nobody knows
            assert await told(sampler) == [(name, ACCEPTED), (name, TRAINED)]
        heartbeats = sampler.membership.Heartbeat()
        heard = []
        for sequence in (1, 2):
            await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=sequence))
            answer = await heartbeats.read()
            assert isinstance(answer, membership_pb2.HeartbeatResponse)
            heard.append([one.group_id for one in answer.verdicts])
        assert heard == [[name, name], []]
        assert await verdicts(learner) == {"spooled": 1, "accepted": 1, "trained": 1}
        assert hub.metric("heterorl_coordinator_groups_total", verdict="trained") == 1
        assert hub.metric("heterorl_coordinator_group_staleness_versions_sum") == 1
        row = await row_of(learner, "sampler-1")
        assert (row.verdicts["trained"], row.staleness_mean_versions) == (1, 1.0)


async def test_groups_come_in_their_order_as_far_as_credits_go_and_once_on_a_stream(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        names = await spool(sampler, 4)
        drain = await learner.drain(credits=2)
        assert [await drain.group(), await drain.group()] == names[:2]
        await drain.say(credit=rollout_pb2.DrainCredit(groups=1))
        assert await drain.group() == names[2]
        assert await drain.hears_nothing()


async def test_a_new_stream_has_what_was_neither_trained_on_nor_refused_nor_is_held(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        trained, refused, held, lost = await spool(sampler, 4)
        drain = await learner.drain(credits=4)
        for _ in range(4):
            await drain.group()
        await drain.judge(refused, STALE)
        await drain.step(1, trained)
        await acknowledged(drain, 1)
        drain.stream.cancel()
        again = await learner.drain(
            credits=4, version=1, held_group_ids=[held], steps=[step_record(1, trained)]
        )
        await acknowledged(again, 1)
        assert await again.group() == lost
        assert await again.hears_nothing()


async def test_a_verdict_said_twice_is_counted_and_told_once(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        kept, refused = await spool(sampler, 2)
        drain = await learner.drain(credits=2)
        await drain.group(), await drain.group()
        for name, verdict in ((kept, ACCEPTED), (refused, STALE), (kept, ACCEPTED), (refused, STALE)):
            await drain.judge(name, verdict)
        await drain.step(1, kept)
        await acknowledged(drain, 1)
        await drain.judge(kept, ACCEPTED)
        await drain.judge(refused, ACCEPTED)
        await drain.step(2)
        await acknowledged(drain, 2)
        assert await told(sampler) == [(kept, ACCEPTED), (refused, STALE), (kept, TRAINED)]
        assert await verdicts(learner) == {"spooled": 2, "accepted": 1, "stale": 1, "trained": 1}


@pytest.mark.parametrize("verdict", [STALE, common_pb2.VERDICT_SUSPECT, common_pb2.VERDICT_FOREIGN])
async def test_the_prompt_of_a_group_that_the_learner_refused_is_leased_again(
    hub: RunningHub, verdict: common_pb2.Verdict.ValueType
) -> None:
    async with members(hub) as (learner, sampler):
        (name,) = await spool(sampler, 1)
        drain = await learner.drain(credits=1)
        await drain.judge(await drain.group(), verdict)
        await until_slots(learner, available=1)
        assert [lease.lease_id for lease in (await sampler.lease()).leases] == ["0.2"]
        assert [one for one, _ in await told(sampler)] == [name]


async def test_a_group_that_teaches_nothing_settles_its_slot_and_makes_no_version(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        (name,) = await spool(sampler, 1)
        drain = await learner.drain(credits=1)
        await drain.judge(await drain.group(), UNINFORMATIVE)
        await until_slots(learner, uninformative=1)
        assert (await learner.drain(version=0)) is not None
        assert await told(sampler) == [(name, UNINFORMATIVE)]
        assert [lease.lease_id for lease in (await sampler.lease()).leases] == ["1.1"]


async def test_a_step_told_twice_is_acknowledged_and_counted_once(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        first, second = await spool(sampler, 2)
        drain = await learner.drain(credits=2)
        await drain.step(1, first)
        await drain.step(1, first)
        await drain.step(2, second)
        await drain.step(1, first)
        await drain.step(3)
        await acknowledged(drain, 3)
        assert await slots(learner) == {"trained": 2}
        assert await verdicts(learner) == {"spooled": 2, "trained": 2}


@pytest.mark.parametrize("version", [3, 9])
async def test_a_step_beyond_a_gap_is_not_taken_and_the_learner_is_told_what_is_missing(
    hub: RunningHub, version: int
) -> None:
    async with members(hub) as (learner, sampler):
        (name,) = await spool(sampler, 1)
        drain = await learner.drain()
        await drain.step(1)
        await acknowledged(drain, 1)
        await drain.step(version, name)
        refused = await refusal_of(drain.stream.read())
        assert (refused.reason, refused.names(f"version {version}", "2")) == (Reason.LEDGER_BEHIND, True)
        assert await slots(learner) == {"spooled": 1}
        # Told in order, with the one between, all of it is taken.
        steps = [step_record(number) for number in range(2, version)] + [step_record(version, name)]
        again = await learner.drain(version=version, steps=steps)
        await acknowledged(again, version)
        assert await slots(learner) == {"trained": 1}


@pytest.mark.parametrize("named", [(0,), (1, 0), (1, 1)])
async def test_a_step_may_not_name_a_group_that_another_step_had_or_one_twice(
    hub: RunningHub, named: tuple[int, ...]
) -> None:
    async with members(hub) as (learner, sampler):
        names = await spool(sampler, 2)
        drain = await learner.drain(credits=2)
        await drain.step(1, names[0])
        await acknowledged(drain, 1)
        await drain.step(2, *(names[each] for each in named))
        refused = await refusal_of(drain.stream.read())
        assert (refused.reason, refused.names(names[named[-1]])) == (Reason.DUPLICATE, True)
        assert await verdicts(learner) == {"spooled": 2, "trained": 1}
        assert await slots(learner) == {"spooled": 1, "trained": 1}
        assert hub.metric("heterorl_coordinator_double_trainings_total") == 1
        assert (await sampler.lease()).waits_for != "ledger"


async def test_a_step_may_not_name_a_group_that_the_ledger_never_took_in(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        (lease,) = (await sampler.lease()).leases
        drain = await learner.drain()
        await drain.step(1, lease.lease_id)
        refused = await refusal_of(drain.stream.read())
        assert (refused.reason, refused.names(lease.lease_id)) == (Reason.LEDGER_BEHIND, True)
        assert await slots(learner) == {"leased": 1}
        assert hub.metric("heterorl_coordinator_unknown_trainings_total") == 1
        assert (await sampler.lease()).waits_for == "ledger"


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
        {"quarantine": rollout_pb2.Quarantine(sampler_id="no name", reason="why")},
        {"hello": rollout_pb2.DrainHello(learner_epoch=1)},
        {},
    ],
)
async def test_a_message_that_makes_no_sense_ends_the_stream(
    hub: RunningHub, message: dict[str, Any]
) -> None:
    async with members(hub) as (learner, _):
        drain = await learner.drain()
        await drain.say(**message)
        assert (await refusal_of(drain.stream.read())).reason is Reason.MALFORMED


async def test_a_stream_begins_with_a_hello(hub: RunningHub) -> None:
    async with members(hub) as (learner, _):
        credit = rollout_pb2.DrainRolloutsRequest(credit=rollout_pb2.DrainCredit(groups=1))
        call = first_answer(learner.rollout.DrainRollouts, credit)
        assert (await refusal_of(call)).reason is Reason.MALFORMED


async def test_a_group_of_a_slot_that_was_trained_on_is_a_duplicate_for_ever(hub: RunningHub) -> None:
    """Also of an attempt that was leased before the winner's."""
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, late, other):
        (expired,) = (await late.lease()).leases
        hub.clock.advance(61)
        await until_slots(learner, available=1)
        (name,) = await spool(other, 1)
        drain = await learner.drain(credits=1)
        await drain.step(1, name)
        await acknowledged(drain, 1)
        assert (await late.submit(expired)).verdict == DUPLICATE
        assert await slots(learner) == {"trained": 1}
