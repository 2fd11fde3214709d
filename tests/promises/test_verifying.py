"""Rewards are worked out again by the run's own verifiers: what they find, and what happens without them."""

from pathlib import Path
from typing import Any

import pytest

from heterorl.v1 import rollout_pb2
from node.errors import Reason
from node.identity.identity_store import Identity
from node.values.groups.reward_finding import RewardCheck
from node.values.roles import Role
from support.by_rpc import (
    ACCEPTED,
    DUPLICATE,
    MALFORMED,
    SPOOLED,
    SUSPECT,
    acknowledged,
    delivered,
    disk_of,
    hand_verifier,
    next_message,
    refusal_of,
    row_of,
    say,
    slots,
    spool,
    submit_ungraded,
    told,
    until_slots,
    verdicts,
)
from support.enrolled import let_in
from support.hub import RunningHub, joined, members
from support.identity import MadeRun
from support.waiting import eventually

WIDE: dict[str, Any] = {"max_staleness_versions": 50}
GRADED: dict[str, Any] = {"graded_by": "verifier"}
A_WHILE_S = 3600.0
"""Longer than a verifier has for any group."""


def second(made: MadeRun) -> Identity:
    return made.issue(Role.VERIFIER, "verifier-2")


async def test_a_newcomers_group_waits_for_its_check_and_then_goes_on(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler), hand_verifier(hub) as verifier:
        drain = await learner.drain(credits=9)
        (name,) = await spool(sampler)
        assert await verifier.group() == name
        await verifier.find(name, RewardCheck.AGREED)
        assert (await delivered(drain)).group_id == name


async def test_a_group_is_not_delivered_before_its_check_is_answered(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler), hand_verifier(hub) as verifier:
        drain = await learner.drain(credits=9)
        (name,) = await spool(sampler)
        assert await verifier.group() == name
        assert await drain.hears_nothing()


async def test_a_proven_lie_throws_the_samplers_groups_out_and_leases_it_nothing_until_it_is_pardoned(
    made: MadeRun, tmp_path: Path
) -> None:
    let_in(made.directory, "sampler-1")
    async with (
        joined(made, made.sampler, made.other_sampler, **WIDE) as (hub, learner, liar, honest),
        hand_verifier(hub) as verifier,
    ):
        drain = await learner.drain(credits=9)
        lied, unchecked = await spool(liar, 2)
        (held,) = (await liar.lease()).leases
        (fine,) = await spool(honest)
        for _ in range(3):
            name = await verifier.group()
            if name != unchecked:
                is_lie = name == lied
                outcome = RewardCheck.DISAGREED if is_lie else RewardCheck.AGREED
                await verifier.find(name, outcome, "completion 0 claims 1" if is_lie else "")
        quarantined = (await next_message(drain, "quarantines")).quarantines
        assert [one.sampler_id for one in quarantined.samplers] == ["sampler-1"]
        await until_slots(learner, available=3, spooled=1)
        assert (await liar.submit(held)).verdict == SUSPECT
        assert (await liar.lease()).waits_for == "quarantine"
        assert sorted(await told(liar)) == [(lied, SUSPECT), (unchecked, SUSPECT)]
        assert (await delivered(drain)).group_id == fine
        row = await row_of(learner, "sampler-1")
        assert (row.standing, "completion 0 claims 1" in row.standing_detail) == ("quarantined", True)
        lies = disk_of(made, tmp_path)
    async with joined(lies, **WIDE) as (_, learner, liar):
        drain = await learner.drain()
        await next_message(drain, "quarantines")
        assert (await liar.lease()).waits_for == "quarantine"
        await say(lies, "pardon", "sampler-1")
        await next_message(drain, "quarantines")
        assert len((await liar.lease()).leases) == 1


async def test_the_groups_of_a_verifier_that_hangs_go_to_one_that_answers(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler), hand_verifier(hub) as hung:
        drain = await learner.drain(credits=9)
        (name,) = await spool(sampler)
        assert await hung.group() == name
        async with hand_verifier(hub, second(hub.made)) as healthy:
            hub.clock.advance(A_WHILE_S)
            assert await healthy.group() == name
            await healthy.find(name, RewardCheck.AGREED)
            assert (await delivered(drain)).group_id == name
            await hung.find(name, RewardCheck.DISAGREED, "too late to count")
        assert (await row_of(learner, "sampler-1")).standing != "quarantined"


async def test_what_a_verifier_that_goes_away_had_goes_to_the_next(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        drain = await learner.drain(credits=9)
        async with hand_verifier(hub) as going:
            (name,) = await spool(sampler)
            assert await going.group() == name
            async with hand_verifier(hub, second(hub.made)) as staying:
                going.stream.cancel()
                assert await staying.group() == name
                await staying.find(name, RewardCheck.AGREED)
                assert (await delivered(drain)).group_id == name


async def test_without_a_verifier_rewards_are_believed_and_checked_once_one_is_back(made: MadeRun) -> None:
    """Also what was trained on meanwhile."""
    let_in(made.directory, "sampler-1")
    async with joined(made, **WIDE) as (hub, learner, sampler):
        drain = await learner.drain(credits=9)
        async with hand_verifier(hub) as verifier:
            (checked,) = await spool(sampler)
            assert await verifier.group() == checked
            await verifier.find(checked, RewardCheck.AGREED)
            assert (await delivered(drain)).group_id == checked

        async def is_believed() -> bool:
            (name,) = await spool(sampler)
            return (await delivered(drain)).group_id == name

        await eventually(is_believed)
        await drain.step(1, "1.1")
        await acknowledged(drain, 1)
        async with hand_verifier(hub) as verifier:
            assert await verifier.group() == "1.1"
            await verifier.find("1.1", RewardCheck.DISAGREED, "completion 0 claims 1")
            await next_message(drain, "quarantines")
            assert (await sampler.lease()).waits_for == "quarantine"


async def test_where_a_verifier_is_required_every_group_waits_for_one(made: MadeRun) -> None:
    async with joined(made, require_verifier=True) as (hub, learner, sampler):
        drain = await learner.drain(credits=9)
        (name,) = await spool(sampler)
        assert await slots(learner) == {"spooled": 1}
        async with hand_verifier(hub) as verifier:
            assert await verifier.group() == name
            await verifier.find(name, RewardCheck.AGREED)
            assert (await delivered(drain)).group_id == name


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"task_digest": b"other options..."}, Reason.BUSY),
        ({"groups": 0}, Reason.MALFORMED),
        ({"groups": 100_000}, Reason.MALFORMED),
        ({"noise_ratio": 0.9}, Reason.MALFORMED),
        ({"grading_limit_s": -1.0}, Reason.MALFORMED),
    ],
)
async def test_a_verifier_that_grades_otherwise_or_makes_no_sense_is_refused(
    hub: RunningHub, hello: dict[str, Any], reason: Reason
) -> None:
    async with members(hub), hand_verifier(hub, **hello) as verifier:
        assert (await refusal_of(verifier.stream.read())).reason is reason


async def test_a_verifiers_stream_begins_with_a_hello_of_one_that_has_joined(hub: RunningHub) -> None:
    async with members(hub), hub.peer(hub.made.verifier) as verifier:
        hello = rollout_pb2.CheckRewardsRequest(hello=rollout_pb2.VerifierHello(groups=1))
        for joins, request, reason in (
            (False, hello, Reason.NOT_JOINED),
            (True, rollout_pb2.CheckRewardsRequest(), Reason.MALFORMED),
        ):
            if joins:
                await verifier.join()
            stream = verifier.rollout.CheckRewards()
            await stream.write(request)
            assert (await refusal_of(stream.read())).reason is reason


async def test_where_verifiers_grade_a_group_has_the_grades_of_one_and_is_trained_on_once(
    made: MadeRun, tmp_path: Path
) -> None:
    async with joined(made, **GRADED) as (hub, learner, sampler):
        (lease,) = (await sampler.lease()).leases
        assert (await submit_ungraded(sampler, lease)).verdict == SPOOLED
        assert (await submit_ungraded(sampler, lease)).verdict == DUPLICATE
        assert await slots(learner) == {"ungraded": 1}
        lies = disk_of(made, tmp_path)
    async with (
        joined(lies, **GRADED) as (hub, learner, sampler),
        hand_verifier(hub) as one,
        hand_verifier(hub, second(made)) as other,
    ):
        drain = await learner.drain(credits=9)
        assert await one.group() == lease.lease_id
        one.stream.cancel()
        assert await other.group() == lease.lease_id
        await other.grade(lease.lease_id, 0.25, 1.0)
        await other.grade(lease.lease_id, 0.5, 0.5)
        group = await delivered(drain)
        assert [completion.reward for completion in group.completions] == [0.25, 1.0]
        await drain.judge(lease.lease_id, ACCEPTED)
        await drain.step(1, lease.lease_id)
        await acknowledged(drain, 1)
        assert await slots(learner) == {"trained": 1}
        assert await verdicts(learner) == {"spooled": 1, "accepted": 1, "trained": 1}


async def test_where_verifiers_grade_a_sampler_that_sends_rewards_is_refused(made: MadeRun) -> None:
    async with joined(made, **GRADED) as (_, learner, sampler):
        (lease,) = (await sampler.lease()).leases
        answer = await sampler.submit(lease)
        assert (answer.verdict, "verifiers" in answer.detail) == (MALFORMED, True)
        assert await slots(learner) == {"available": 1}


async def test_a_group_that_no_verifier_can_grade_is_not_trained_on_and_its_prompt_is_asked_again(
    made: MadeRun,
) -> None:
    async with joined(made, **GRADED) as (hub, learner, sampler), hand_verifier(hub) as verifier:
        (lease,) = (await sampler.lease()).leases
        assert (await submit_ungraded(sampler, lease)).verdict == SPOOLED
        assert await verifier.group() == lease.lease_id
        await verifier.find(lease.lease_id, RewardCheck.UNGRADABLE, "the grader raised")
        await until_slots(learner, available=1)
        assert [name for name, _ in await told(sampler)] == [lease.lease_id]


async def test_a_group_whose_judge_was_away_comes_again(made: MadeRun) -> None:
    async with joined(made, **GRADED) as (hub, learner, sampler), hand_verifier(hub) as verifier:
        (lease,) = (await sampler.lease()).leases
        await submit_ungraded(sampler, lease)
        assert await verifier.group() == lease.lease_id
        await verifier.find(lease.lease_id, RewardCheck.SKIPPED, "the judge is away")
        drain = await learner.drain(credits=9)
        await verifier_waits(hub)
        assert await verifier.group() == lease.lease_id
        await verifier.grade(lease.lease_id, 0.0, 1.0)
        assert (await delivered(drain)).group_id == lease.lease_id


async def verifier_waits(hub: RunningHub) -> None:
    """Let the pause after a finding that says nothing go by."""

    async def is_noted() -> bool:
        return hub.metric("heterorl_coordinator_reward_checks_total", outcome="skipped") == 1

    await eventually(is_noted)
    hub.clock.advance(60)
