"""Answers of the coordinator, and what each leaves in the accounts."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.coordinator.work.balance import Balance
from node.coordinator.work.capacity import Capacity
from node.coordinator.work.decisions import announcements, judged_groups, leasing
from node.coordinator.work.decisions.decision import NOTHING
from node.coordinator.work.decisions.leasing import LeaseRequest
from node.coordinator.work.slots import next_slots
from node.coordinator.work.slots.slot import Attempt, Slot, SlotBalance, SlotState
from node.coordinator.work.slots.slot_generations import Generation
from node.errors import Reason, RefusedError
from node.values.groups.failure import Failure
from node.values.groups.rollout import LeaseGrant
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.policy import PolicyVersion
from support.coordinator import BOUNDS, LEARNER, NOW_S, TTL_S, Desk, make_accounts, make_answer
from support.groups import make_completion, make_group
from support.refusals import refused


@pytest.fixture
def desk() -> Desk:
    return Desk()


def grant(desk: Desk, wanted: int = 1, *, held: int | None = 0) -> LeaseGrant:
    version = None if held is None else PolicyVersion(held)
    return leasing.lease(desk.accounts, LeaseRequest("s1", wanted, version), now=desk.now).answer


def judge(desk: Desk, group_id: str, verdict: Verdict) -> judged_groups.Judged | None:
    judged: judged_groups.Judged | None = desk.settle(
        judged_groups.judgement(desk.accounts, GroupVerdict(group_id, verdict), now=desk.now)
    )
    return judged


def refusal(error: pytest.ExceptionInfo[RefusedError]) -> Reason:
    return error.value.reason


@pytest.mark.parametrize(("held", "waits_for"), [(7, "policy version"), (8, ""), (11, "")])
def test_a_sampler_older_than_the_staleness_bound_gets_nothing(held: int, waits_for: str) -> None:
    desk = Desk(make_accounts(Balance(facts=(replace(LEARNER, version=10),))))
    assert grant(desk, held=held).waits_for == waits_for


def test_a_request_is_granted_as_far_as_the_tightest_bound_goes(desk: Desk) -> None:
    desk.trust("s1")
    answer = grant(desk, 9)
    assert (len(answer.leases), answer.waits_for) == (6, "staleness")  # (2 + 0 + 1) * 2
    assert answer.retry_after_s == leasing.PARTIAL_PAUSE_S
    assert grant(desk, 6) == replace(answer, retry_after_s=0.0, waits_for="")


def test_a_request_that_is_granted_nothing_waits_longer_than_one_granted_in_part(desk: Desk) -> None:
    desk.trust("s2")
    desk.lease("s2", 6)
    answer = grant(desk)
    assert (answer.leases, answer.waits_for) == ((), "staleness")
    assert answer.retry_after_s == leasing.EMPTY_PAUSE_S > leasing.PARTIAL_PAUSE_S


def test_a_grant_cut_short_by_prompts_that_are_aside_says_that_it_waits_for_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_slots, "LEFT_TO_OTHERS_PER_GRANT", 1)
    desk = Desk(make_accounts(prompts=2))
    desk.trust("s1")
    desk.lease()
    desk.fail("0.1", fault=Failure.PROMPT_TOO_LONG)
    answer = grant(desk, 6)
    assert 1 <= len(answer.leases) < 6
    assert answer.waits_for == "prompts"


def test_what_no_lease_of_its_sender_asked_for_is_answered_without_a_write(desk: Desk) -> None:
    desk.lease("s1")
    desk.submit("0.1", "s1")
    desk.transactions.clear()
    for name in ("nonsense", "0.1", "0.2", "77.1"):
        for sampler_id in ("s1", "s2"):
            assert desk.submit(name, sampler_id).verdict is not Verdict.SPOOLED
    assert set(desk.transactions) == {NOTHING}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"completions": (make_completion(reward=1e30), make_completion())}, r"reward 1e\+30, beyond 1e\+06"),
        ({"graded_at_s": 1e300}, "timestamps"),
        ({"graded_at_s": math.inf}, "timestamps"),
        ({"sampling_finished_at_s": 0.5}, "not those of sampling begun, then finished"),
        ({"sampling_started_at_s": -1.0}, "timestamps"),
        ({"prompt_token_ids": np.ones(65, np.int32)}, "a prompt of 65 tokens, allowed are 64"),
        ({"prompt_token_ids": np.ones(60, np.int32)}, "have 64 tokens, the run's model takes 63"),
    ],
)
def test_numbers_that_no_honest_sampler_sends_are_refused_where_groups_enter(
    desk: Desk, changes: dict[str, Any], why: str
) -> None:
    desk.lease()
    submitted = desk.submit("0.1", group=make_answer(desk.accounts, "0.1", **changes))
    assert submitted.verdict is Verdict.MALFORMED
    assert re.search(why, submitted.detail)


def test_a_group_leased_before_the_options_changed_is_refused_and_not_held_against_its_sampler(
    desk: Desk,
) -> None:
    desk.trust("s1")
    strikes = []
    (early,) = desk.lease()
    desk.settle(announcements.task_is(desk.accounts, b"o" * 16, now=desk.now))
    (late,) = desk.lease()
    for name in (early, late):
        group = make_group(name, prompt_index=desk.granted[name].prompt_index, task_digest=b"o" * 16)
        assert desk.submit(name, group=group).verdict is Verdict.FOREIGN
        strikes.append(desk.accounts.standings.of("s1").strikes)
    assert strikes == [0, 2]


def test_a_group_that_comes_before_the_learner_is_asked_for_again_later() -> None:
    leased = Slot(0, 0, SlotState.LEASED, (Attempt(1, "s1"),), granted=1)
    desk = Desk(make_accounts(Balance(SlotBalance(open_ones=(leased,), next_slot=1))))
    assert leasing.room(make_accounts(Balance())) == Capacity(0, "learner")
    with refused(Reason.BUSY, "learner") as error:
        desk.submit("0.1")
    assert refusal(error) is Reason.BUSY
    assert desk.accounts.slots.open_slots[0] == leased


def test_a_late_malformed_group_does_not_take_the_prompt_from_its_new_holder(desk: Desk) -> None:
    desk.lease("s1")
    desk.expire(TTL_S)
    desk.lease("s2")
    group = make_answer(desk.accounts, "0.1", prompt_index=49)
    assert desk.submit("0.1", "s1", group=group).verdict is Verdict.FOREIGN
    assert desk.accounts.slots.open_slots[0].state is SlotState.LEASED
    assert desk.submit("0.2", "s2").verdict is Verdict.SPOOLED


@pytest.mark.parametrize("announced", [{0}, {0, 3}, {0, 4}])
def test_a_group_of_a_version_that_there_is_not_is_foreign(desk: Desk, announced: set[int]) -> None:
    desk.accounts.is_on_offer = announced.__contains__
    desk.lease()
    completions = (make_completion(version=3), make_completion(version=4))
    submitted = desk.submit("0.1", group=make_answer(desk.accounts, "0.1", completions=completions))
    missing = min({3, 4} - announced)
    assert (submitted.verdict, f"version {missing}" in submitted.detail) == (Verdict.FOREIGN, True)


@pytest.mark.parametrize("loses", [(), (Generation(1, 100, 100, NOW_S, lost_versions=range(5, 9)),)])
@pytest.mark.parametrize("version", [1, 8, 9])
def test_a_group_of_a_version_that_the_learner_has_made_is_taken_whatever_announcements_were_lost(
    version: int, loses: tuple[Generation, ...]
) -> None:
    """No hub may ever be handed such a version again: its sampler would be told to come again in vain."""
    desk = Desk(make_accounts(Balance(facts=(replace(LEARNER, version=9), *loses))))
    [name] = desk.lease("s1", held=9)
    group = make_answer(desk.accounts, name, completions=(make_completion(version=version),) * 2)
    assert desk.submit(name, "s1", group=group).verdict is Verdict.SPOOLED


def test_a_group_of_a_version_of_which_the_learner_has_not_told_yet_is_to_come_again() -> None:
    leased = Slot(0, 0, SlotState.LEASED, (Attempt(1, "s1"),), granted=1)
    balance = Balance(SlotBalance(open_ones=(leased,), next_slot=1), facts=(replace(LEARNER, version=8),))
    desk = Desk(make_accounts(balance))
    group = make_answer(desk.accounts, "0.1", completions=(make_completion(version=9),) * 2)
    with refused(Reason.BUSY, "version 9"):
        desk.submit("0.1", group=group)
    assert desk.accounts.slots.open_slots[0].state is SlotState.LEASED
    desk.accounts.is_on_offer = {9}.__contains__
    assert desk.submit("0.1", group=group).verdict is Verdict.SPOOLED


def test_the_spool_takes_groups_as_far_as_their_bytes_fit_and_always_a_batch() -> None:
    desk = Desk()
    leased = desk.lease(wanted=4)
    desk.bounds = replace(BOUNDS, buffer_bytes=10)
    for lease_id in leased[:2]:
        assert desk.submit(lease_id).verdict is Verdict.SPOOLED  # 9 bytes each
    with refused(Reason.BUSY, "2 groups", "18 bytes"):
        desk.submit("2.1")
    assert desk.lease() == []
    desk.train(1, "0.1", "1.1")
    assert desk.submit("2.1").verdict is Verdict.SPOOLED


def test_a_group_that_grows_stale_after_acceptance_is_sampled_again(desk: Desk) -> None:
    desk.lease()
    desk.submit("0.1")
    judge(desk, "0.1", Verdict.ACCEPTED)
    assert judge(desk, "0.1", Verdict.STALE) == judged_groups.Judged("s1", None)
    assert desk.lease("s2") == ["0.2"]


def test_a_group_that_teaches_nothing_is_consumed_and_makes_nobody_staler(desk: Desk) -> None:
    """Bound 2, batches of 2: 6 groups at version 0, however many of them taught nothing."""
    desk.trust("s1")
    names = desk.lease(wanted=8)
    assert len(names) == 6
    for name in names[:2]:
        desk.submit(name)
        judge(desk, name, Verdict.ACCEPTED)
        assert judge(desk, name, Verdict.UNINFORMATIVE) == judged_groups.Judged("s1", None)
    assert desk.accounts.slots.open.untrained_slots() == []
    assert desk.accounts.slots.counts()[SlotState.UNINFORMATIVE] == 2
    assert desk.accounts.tallies.total()[Verdict.UNINFORMATIVE] == 2
    assert (desk.accounts.last_step, desk.accounts.load().version) == (0, 0)
    assert desk.submit(names[0]).verdict is Verdict.DUPLICATE
    assert desk.lease("s2", wanted=8) == ["6.1", "7.1"]


def test_a_group_that_the_learner_trained_on_before_is_neither_delivered_nor_leased_again(desk: Desk) -> None:
    desk.lease()
    desk.submit("0.1")
    judge(desk, "0.1", Verdict.DUPLICATE)
    assert [slot.winner for slot in desk.transactions[-1].slots] == [0]
    assert desk.accounts.slots.open.untrained_slots() == []
    assert desk.accounts.slots.counts()[SlotState.LOST] == 1
    assert desk.lease() == ["1.1"]
    assert desk.submit("0.1").verdict is Verdict.FOREIGN
