"""Who samples which prompt, how many at once, and what becomes of a lease that brings nothing."""

from typing import Any

import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.errors import Reason
from support.by_rpc import (
    DUPLICATE,
    SPOOLED,
    refusal_of,
    row_of,
    slots,
    submit_ungraded,
    until_slots,
    verdicts,
)
from support.hub import LEASE_TTL_S, HandPeer, RunningHub, joined, members
from support.identity import MadeRun

SECOND_TRY_S = 10.0
"""By then a prompt that failed is leased to another sampler."""


async def ids(sampler: HandPeer, wanted: int) -> list[str]:
    return [lease.lease_id for lease in (await sampler.lease(wanted)).leases]


async def give_back(sampler: HandPeer, *lease_ids: str) -> int:
    request = rollout_pb2.ReleaseLeasesRequest(lease_ids=lease_ids)
    return (await sampler.rollout.ReleaseLeases(request)).released


async def fail(sampler: HandPeer, lease_id: str, fault: rollout_pb2.LeaseFault.ValueType) -> None:
    failed = [rollout_pb2.FailedLease(lease_id=lease_id, fault=fault, detail="why\n")]
    request = rollout_pb2.ReleaseLeasesRequest(failed=failed)
    assert (await sampler.rollout.ReleaseLeases(request)).released == 1


async def test_each_prompt_is_leased_once_an_epoch_and_each_slot_once(made: MadeRun) -> None:
    """However many samplers ask, and in however many requests."""
    settings = {"prompts": 6, "max_staleness_versions": 50, "max_new_tokens": 4}
    async with joined(made, made.sampler, made.other_sampler, **settings) as (_, _, one, other):
        leases = [lease for peer in (one, other, one, other) for lease in (await peer.lease(3)).leases]
        assert [lease.lease_id for lease in leases] == [f"{slot}.1" for slot in range(12)]
        for epoch in (leases[:6], leases[6:]):
            assert sorted(lease.prompt_index for lease in epoch) == list(range(6))
        assert {(one.task, one.group_size, one.sampling.max_new_tokens) for one in leases} == {
            ("addition", 2, 4)
        }


@pytest.mark.parametrize(
    ("settings", "granted", "bound"),
    [
        ({"max_staleness_versions": 0}, 2, "staleness"),
        ({"max_staleness_versions": 2, "batch_groups": 1}, 3, "staleness"),
        ({"max_staleness_versions": 9, "concurrency_groups": 3}, 3, "concurrency"),
        ({"max_staleness_versions": 9, "buffer_groups": 4}, 4, "buffer"),
        ({"max_staleness_versions": 2}, 4, "share"),
    ],
)
async def test_no_more_is_leased_than_a_bound_allows_and_the_answer_names_it(
    made: MadeRun, settings: dict[str, Any], granted: int, bound: str
) -> None:
    async with joined(made, **settings) as (_, _, sampler):
        answer = await sampler.lease(256)
        assert (len(answer.leases), answer.waits_for) == (granted, bound)
        assert answer.retry_after_s > 0
        none = await sampler.lease(1)
        assert (len(none.leases), none.waits_for) == (0, bound)


async def test_groups_that_wait_count_against_staleness_until_the_learner_has_trained(made: MadeRun) -> None:
    async with joined(made, max_staleness_versions=0) as (_, learner, sampler):
        for lease in (await sampler.lease(9)).leases:
            assert (await sampler.submit(lease)).verdict == SPOOLED
        assert (await sampler.lease()).waits_for == "staleness"
        drain = await learner.drain(credits=2)
        await drain.step(1, await drain.group(), await drain.group())
        assert await drain.acknowledgement() == 1
        assert (await sampler.lease()).waits_for == "policy version"  # what it has would be too old
        sampler.held = common_pb2.PolicyVersion(number=1)
        assert await ids(sampler, 9) == ["2.1", "3.1"]


async def test_groups_that_nobody_has_graded_hold_up_leases_where_verifiers_grade(made: MadeRun) -> None:
    settings: dict[str, Any] = {"graded_by": "verifier", "buffer_groups": 4, "max_staleness_versions": 50}
    async with joined(made, **settings) as (_, learner, sampler):
        while (answer := await sampler.lease(1)).leases:
            assert (await submit_ungraded(sampler, answer.leases[0])).verdict == SPOOLED
        assert answer.waits_for == "checks"
        (state,) = await slots(learner)
        assert state == "ungraded"


async def test_a_sampler_without_a_version_gets_nothing_and_is_told_so(hub: RunningHub) -> None:
    async with members(hub) as (_, sampler):
        answer = await sampler.rollout.LeasePrompts(rollout_pb2.LeasePromptsRequest(max_leases=1))
        assert (len(answer.leases), answer.waits_for) == (0, "policy version")


@pytest.mark.parametrize("max_leases", [0, -1, 257])
async def test_an_impossible_number_of_leases_is_malformed(hub: RunningHub, max_leases: int) -> None:
    async with members(hub) as (_, sampler):
        refused = await refusal_of(sampler.lease(max_leases))
        assert (refused.reason, refused.names(str(max_leases))) == (Reason.MALFORMED, True)


async def test_a_lease_lives_by_heartbeats_and_goes_to_the_next_sampler_without(hub: RunningHub) -> None:
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, silent, lively):
        (lost,) = await ids(silent, 1)
        (kept,) = await ids(lively, 1)
        hub.clock.advance(LEASE_TTL_S - 1)
        assert list((await lively.heartbeat(kept)).lost_lease_ids) == []
        hub.clock.advance(2)
        await until_slots(learner, available=1, leased=1)
        assert await ids(lively, 1) == ["0.2"]
        assert list((await silent.heartbeat(lost)).lost_lease_ids) == [lost]
        assert list((await lively.heartbeat(kept)).lost_lease_ids) == []
        assert hub.metric("heterorl_coordinator_lease_expiries_total") == 1


@pytest.mark.parametrize("is_first", [True, False], ids=["late but first", "late and second"])
async def test_the_first_attempt_submitted_wins_the_slot_and_the_other_is_a_duplicate(
    hub: RunningHub, is_first: bool
) -> None:
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, late, other):
        (expired,) = (await late.lease()).leases
        hub.clock.advance(LEASE_TTL_S + 1)
        await until_slots(learner, available=1)
        (again,) = (await other.lease()).leases
        assert (again.lease_id, again.prompt_index) == ("0.2", expired.prompt_index)
        attempts = [(late, expired), (other, again)]
        answers = [
            (await peer.submit(lease)).verdict for peer, lease in (attempts if is_first else attempts[::-1])
        ]
        assert answers == [SPOOLED, DUPLICATE]
        assert await slots(learner) == {"spooled": 1}
        (group,) = await learner.groups(1)
        assert group.group_id == (expired if is_first else again).lease_id


async def test_a_lease_has_a_largest_age_whatever_heartbeats_say(made: MadeRun) -> None:
    async with joined(made, lease_max_s=120.0) as (hub, learner, hoarder):
        held = await ids(hoarder, 4)
        for _ in range(5):
            hub.clock.advance(30)
            await hoarder.heartbeat(*held)
        await until_slots(learner, available=4)
        assert (await row_of(learner, "sampler-1")).standing == "hoards"


async def test_leases_given_back_are_leased_at_once_and_only_by_who_holds_them(hub: RunningHub) -> None:
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (_, sampler, other):
        held = await ids(sampler, 2)
        assert await give_back(other, *held) == 0
        assert await give_back(sampler, *held, "99.1", "junk") == 2
        assert await ids(other, 3) == ["0.2", "1.2", "2.1"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (rollout_pb2.LEASE_FAULT_PROMPT_TOO_LONG, "prompt_too_long"),
        (rollout_pb2.LEASE_FAULT_PROMPT_FAILED, "prompt_failed"),
        (rollout_pb2.LEASE_FAULT_PROMPT_TIMED_OUT, "prompt_timed_out"),
        (rollout_pb2.LEASE_FAULT_GRADING_FAILED, "grading_failed"),
        (rollout_pb2.LEASE_FAULT_GRADING_TIMED_OUT, "grading_timed_out"),
        (rollout_pb2.LEASE_FAULT_ENGINE_REFUSED, "engine_refused"),
    ],
)
async def test_a_prompt_that_failed_is_kept_from_that_sampler_and_set_aside_once_a_second_fails_it(
    hub: RunningHub, fault: rollout_pb2.LeaseFault.ValueType, reason: str
) -> None:
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, one, other):
        (first,) = (await one.lease()).leases
        await fail(one, first.lease_id, fault)
        (elsewhere,) = (await one.lease()).leases
        assert elsewhere.prompt_index != first.prompt_index
        (bad,) = (await learner.status()).bad_prompts
        assert (bad.prompt_index, bad.reason, bad.detail) == (first.prompt_index, reason, "why")
        assert list(bad.said_by) == ["sampler-1"]
        hub.clock.advance(SECOND_TRY_S)
        (again,) = (await other.lease()).leases
        assert (again.prompt_index, again.lease_id) == (first.prompt_index, "0.2")
        await fail(other, again.lease_id, fault)
        (bad,) = (await learner.status()).bad_prompts
        assert sorted(bad.said_by) == ["sampler-1", "sampler-2"]
        assert await slots(learner) == {"abandoned": 1, "leased": 1}
        assert bad.retry_at_s > hub.clock.now()


async def test_a_group_for_a_prompt_that_another_sampler_failed_clears_the_prompt(hub: RunningHub) -> None:
    async with members(hub, hub.made.sampler, hub.made.other_sampler) as (learner, one, other):
        (failed,) = await ids(one, 1)
        await fail(one, failed, rollout_pb2.LEASE_FAULT_GRADING_FAILED)
        hub.clock.advance(SECOND_TRY_S)
        (again,) = (await other.lease()).leases
        assert (await other.submit(again)).verdict == SPOOLED
        assert (await learner.status()).bad_prompts_total == 0
        assert await verdicts(learner) == {"spooled": 1}


async def test_status_shows_what_a_sampler_holds_and_for_how_long(hub: RunningHub) -> None:
    async with members(hub) as (learner, sampler):
        await ids(sampler, 4)
        hub.clock.advance(30)
        row = await row_of(learner, "sampler-1")
        assert (row.leases, row.standing, row.oldest_lease_s) == (4, "newcomer", 30)
