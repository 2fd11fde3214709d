"""A run has one learner, one history and one ledger; the older ones are refused before they do harm."""

from pathlib import Path
from typing import Any

import pytest

from heterorl.v1 import common_pb2, membership_pb2
from node.errors import Reason
from support.by_rpc import SPOOLED, acknowledged, disk_of, refusal_of, slots, spool, verdicts
from support.hub import (
    RunningHub,
    answer_to,
    first_answer,
    joined,
    members,
    running_hub,
    step_record,
    submission,
)
from support.identity import MadeRun


async def test_a_newer_learner_fences_the_older_wherever_it_calls(hub: RunningHub) -> None:
    newer = hub.made.issue(hub.made.learner.role, "learner-2")
    async with hub.peer() as old, hub.peer(newer) as new:
        await old.join()
        drain = await old.drain()
        refused = await refusal_of(new.join(learner_epoch=1))
        assert (refused.reason, refused.names("learner-2", "learner")) == (Reason.FENCED, True)
        await new.join(learner_epoch=2)
        heartbeat = first_answer(old.membership.Heartbeat, membership_pb2.HeartbeatRequest())
        calls = [drain.stream.read(), old.join(learner_epoch=1), heartbeat, (await old.drain()).stream.read()]
        assert [(await refusal_of(call)).reason for call in calls] == [Reason.FENCED] * 4
        drain = await new.drain(learner_epoch=2)
        await drain.step(1)
        await acknowledged(drain, 1)


async def test_what_a_fenced_learner_still_says_changes_nothing(hub: RunningHub) -> None:
    async with hub.peer() as old, hub.peer() as new, hub.peer(hub.made.sampler) as sampler:
        await old.join()
        await sampler.join()
        (name,) = await spool(sampler)
        drain = await old.drain(credits=1)
        assert await drain.group() == name
        await new.join(learner_epoch=2)
        fresh = await new.drain(learner_epoch=2, credits=1)
        assert await fresh.group() == name
        assert (await refusal_of(drain.stream.read())).reason is Reason.FENCED
        await fresh.step(1)
        await acknowledged(fresh, 1)
        assert await slots(new) == {"spooled": 1}


async def test_a_second_stream_of_the_learner_ends_the_first(hub: RunningHub) -> None:
    async with members(hub) as (learner, _):
        first = await learner.drain(version=1, steps=[step_record(1)])
        await acknowledged(first, 1)
        await learner.drain(version=1)
        assert (await refusal_of(first.stream.read())).reason is Reason.FENCED


@pytest.mark.parametrize(
    ("hello", "names"),
    [
        ({"version": 1}, ("1", "2")),
        ({"version": 2, "steps": [step_record(2, "1.1")]}, ("1.1",)),
        ({"version": 2, "trained_slots": [0, 9]}, ("9",)),
    ],
    ids=["an older checkpoint", "another history", "slots that were never leased"],
)
async def test_a_learner_of_another_history_is_refused_and_disturbs_nobody(
    hub: RunningHub, hello: dict[str, Any], names: tuple[str, ...]
) -> None:
    async with members(hub) as (learner, sampler):
        await spool(sampler, 2)
        drain = await learner.drain(credits=9)
        await drain.step(1)
        await drain.step(2, "0.1")
        await acknowledged(drain, 2)
        refused = await refusal_of((await learner.drain(**hello)).stream.read())
        assert (refused.reason, refused.names(*names)) == (Reason.ROLLBACK, True), refused.detail
        await drain.step(3)
        await acknowledged(drain, 3)
        assert await verdicts(learner) == {"spooled": 2, "trained": 1}


async def test_a_learner_behind_the_ledger_does_not_take_the_place_of_the_one_that_trains(
    hub: RunningHub,
) -> None:
    async with members(hub) as (learner, _), hub.peer() as older:
        drain = await learner.drain()
        for version in (1, 2):
            await drain.step(version)
            await acknowledged(drain, version)
        older.held = common_pb2.PolicyVersion(number=1)
        assert (await refusal_of(older.join(learner_epoch=2))).reason is Reason.ROLLBACK
        await drain.step(3)
        await acknowledged(drain, 3)


async def test_an_older_ledger_leases_nothing_takes_nothing_and_goes_on_once_the_newest_is_back(
    made: MadeRun, tmp_path: Path
) -> None:
    async with joined(made) as (_, learner, sampler):
        trained, spooled = (await sampler.lease(2)).leases
        assert (await sampler.submit(trained)).verdict == SPOOLED
        old = disk_of(made, tmp_path)
        assert (await sampler.submit(spooled)).verdict == SPOOLED
        drain = await learner.drain(credits=9)
        for version, names in ((1, [trained.lease_id]), (2, [])):
            await drain.step(version, *names)
            await acknowledged(drain, version)
        newest = disk_of(made, tmp_path)
    late = submission(answer_to(spooled, run_id=made.run_id))
    hello = {"version": 2, "steps": [step_record(2)]}
    async with joined(old) as (hub, learner, sampler):
        refused = await refusal_of((await learner.drain(**hello)).stream.read())
        assert (refused.reason, refused.names("1", "2")) == (Reason.LEDGER_BEHIND, True), refused.detail
        none = await sampler.lease()
        assert (len(none.leases), none.waits_for) == (0, "ledger")
        assert (await sampler.hand_in(late)).reason == Reason.BUSY
        assert (await learner.status()).ledger_gap
        assert await slots(learner) == {"spooled": 1, "leased": 1}
    async with running_hub(newest) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join(held=common_pb2.PolicyVersion(number=2))
        await sampler.join()
        drain = await learner.drain(credits=9, **hello)
        await acknowledged(drain, 2)
        assert await drain.group() == spooled.lease_id
        assert len((await sampler.lease()).leases) == 1


async def test_a_new_ledger_is_not_begun_for_a_learner_that_has_trained(hub: RunningHub) -> None:
    async with hub.peer() as learner:
        refused = await refusal_of(learner.join(held=common_pb2.PolicyVersion(number=3)))
        assert (refused.reason, refused.names("1", "3")) == (Reason.LEDGER_BEHIND, True)
        assert (await learner.status()).learner_epoch == 0
