"""Groups that come without rewards, in a run whose verifiers grade."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.work.balance import Balance
from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.checks.reward_checks import HELD_S, RewardChecks
from node.coordinator.work.checks.verifier_places import VerifierPlaces
from node.coordinator.work.decisions import announcements, findings
from node.coordinator.work.decisions.findings import GroupFinding
from node.coordinator.work.decisions.judged_groups import judgement
from node.coordinator.work.decisions.submitted_groups import Submitted
from node.coordinator.work.slots.slot import SlotBalance, SlotState, slot_and_attempt
from node.values.groups.failure import Failure
from node.values.groups.reward_finding import GroupGrades, RewardCheck, RewardFinding
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from node.wire.rollouts import graded, group_from_wire, group_to_wire
from support.coordinator import LEARNER, NOW_S, Desk, make_accounts
from support.groups import without_grades
from support.present import present

GRADES = GroupGrades(np.array([0.25, 1.0], np.float32), {"score": np.array([1, 4], np.float32)})


@pytest.fixture
def desk() -> Desk:
    desk = Desk(make_accounts(verifiers_grade=True))
    desk.accounts.reward_checks.open()
    desk.trust("s1", "s2")
    return desk


def submit(desk: Desk, name: str, sampler_id: str = "s1") -> Submitted:
    return desk.submit(name, sampler_id, group=without_grades(desk.answer(name)))


def ungraded(desk: Desk, sampler_id: str = "s1") -> str:
    (name,) = desk.lease(sampler_id)
    assert submit(desk, name, sampler_id).verdict is Verdict.SPOOLED
    return name


def state_of(desk: Desk, name: str) -> SlotState:
    return desk.accounts.slots.open_slots[slot_and_attempt(name)[0]].state


def answered(desk: Desk) -> Held:
    asked = present(desk.accounts.reward_checks.next(VerifierPlaces(1), desk.now))
    held = present(desk.accounts.reward_checks.answered(asked.group_id, desk.now))
    return held


def grade(desk: Desk, name: str) -> Any:
    return put_grades(desk, EncodedGroup(b"header", b"columns", name, "s1"))


def put_grades(desk: Desk, group: EncodedGroup) -> Any:
    """Settle the finding that a group has these grades."""
    held = Held(slot_and_attempt(group.group_id)[0], group.group_id, group.sampler_id, desk.now)
    finding = RewardFinding(group.group_id, RewardCheck.GRADED, grades=GRADES)
    return desk.settle(findings.found(desk.accounts, GroupFinding(held, finding, graded=group), now=desk.now))


def fail(desk: Desk, held: Held, detail: str) -> Any:
    """Settle the finding that the grader fails on a group."""
    finding = RewardFinding(held.group_id, RewardCheck.UNGRADABLE, detail, Failure.GRADING_FAILED)
    return desk.settle(findings.found(desk.accounts, GroupFinding(held, finding), now=desk.now))


def test_grades_that_come_twice_or_late_change_nothing(desk: Desk) -> None:
    name = ungraded(desk)
    grade(desk, name)
    desk.train(1, name)
    before = desk.accounts.slots.counts()
    grade(desk, name)
    assert desk.accounts.slots.counts() == before
    (other,) = desk.lease()
    grade(desk, other)
    assert state_of(desk, other) is SlotState.LEASED


def test_a_group_without_rewards_is_refused_where_samplers_grade() -> None:
    desk = Desk()
    (name,) = desk.lease()
    refused = submit(desk, name)
    assert (refused.verdict, refused.detail) == (Verdict.MALFORMED, "the group has reward nan")


def test_the_learner_judges_no_group_before_it_is_graded(desk: Desk) -> None:
    name = ungraded(desk)
    for verdict in (Verdict.ACCEPTED, Verdict.STALE, Verdict.UNINFORMATIVE):
        assert desk.settle(judgement(desk.accounts, GroupVerdict(name, verdict), now=NOW_S)) is None
    desk.accounts.slots.open.deliver_anew(frozenset())
    assert desk.accounts.next_undelivered() is None
    assert state_of(desk, name) is SlotState.UNGRADED


def test_what_the_grader_fails_on_is_an_attempt_at_its_prompt_like_one_given_back(desk: Desk) -> None:
    name = ungraded(desk)
    held = answered(desk)
    checked = fail(desk, held, "it raised")
    assert [(one.group_id, one.verdict) for one in checked.thrown_out] == [(name, Verdict.SUSPECT)]
    slot = desk.accounts.slots.open_slots[held.slot]
    assert (slot.state, slot.winner, slot.last_failure) == (
        SlotState.AVAILABLE,
        0,
        Failure.GRADING_FAILED,
    )
    (bad,) = desk.accounts.bad_prompts.newest(1)
    assert (bad.reason, bad.said_by) == (Failure.GRADING_FAILED, ("s1",))
    standing = desk.accounts.standings.of("s1")
    assert (standing.faulted, standing.is_proven_liar) == (1, False)
    assert not desk.accounts.reward_checks.is_held(held.slot)
    again = fail(desk, held, "again")
    assert again.thrown_out == ()


def test_a_group_that_is_not_what_its_header_says_is_held_against_its_sampler(desk: Desk) -> None:
    name = ungraded(desk)
    held = answered(desk)
    finding = RewardFinding(name, RewardCheck.UNGRADABLE, "column token_ids has 3 bytes")
    checked = desk.settle(findings.found(desk.accounts, GroupFinding(held, finding, 0.0), now=NOW_S))
    assert len(checked.thrown_out) == 1
    assert state_of(desk, name) is SlotState.AVAILABLE
    assert desk.accounts.standings.of("s1").allowance < 100


def test_groups_that_wait_for_grades_are_asked_for_again_after_a_restart(desk: Desk) -> None:
    name = ungraded(desk)
    slots = SlotBalance(tuple(desk.accounts.slots.open_slots.values()), next_slot=1)
    balance = Balance(slots=slots, facts=(LEARNER,), spooled_at_s=desk.accounts.spooled.at_s)
    again = make_accounts(balance, verifiers_grade=True)
    again.reward_checks.open()
    assert again.next_undelivered() is None
    asked = present(again.reward_checks.next(VerifierPlaces(1), NOW_S))
    assert (asked.group_id, asked.sampler_id) == (name, "s1")
    assert again.ungraded_since_s() == NOW_S


def test_what_waits_for_grades_is_refused_once_samplers_grade(desk: Desk) -> None:
    name = ungraded(desk)
    desk.accounts.work = replace(desk.accounts.work, verifiers_grade=False, task_digest=b"other")
    assert desk.settle(announcements.task_is(desk.accounts, b"before", now=desk.now)) == 1
    assert state_of(desk, name) is SlotState.AVAILABLE


def test_no_more_is_leased_while_half_of_the_buffer_is_ungraded(desk: Desk) -> None:
    bounds = replace(desk.bounds, max_staleness_versions=50)
    desk.bounds = bounds
    desk.trust("s3", "s4")
    names = [ungraded(desk, sampler_id) for sampler_id in ("s1", "s1", "s2")]
    under_way = desk.lease("s3", 1)
    submit(desk, under_way[0], "s3")
    assert len(names) + 1 == bounds.buffer_groups // 2
    grant = desk.ask("s4")
    assert (grant.leases, grant.waits_for) == ((), "grading")
    grade(desk, names[0])
    assert len(desk.lease("s4")) == 1


def test_one_samplers_groups_fill_half_of_that_room_and_the_others_have_theirs(desk: Desk) -> None:
    """A judge that is slow for one sampler's groups would stop the run otherwise."""
    desk.bounds = replace(desk.bounds, max_staleness_versions=50)
    for _ in range(2):
        ungraded(desk, "s1")
    grant = desk.ask("s1")
    assert (grant.leases, grant.waits_for) == ((), "checks")
    assert ungraded(desk, "s2")


def test_newcomers_have_no_part_of_their_own_where_they_cannot_lie(desk: Desk) -> None:
    assert desk.accounts.waiting_newcomers() == 0
    name = ungraded(desk, "s2")
    grade(desk, name)
    assert desk.accounts.next_undelivered() is not None


def test_a_group_with_its_grades_takes_its_own_place_in_the_ledger(
    open_ledger: Callable[[], Any],
) -> None:
    """In either engine, with one commit; a restart finds it graded."""
    with open_ledger() as opened:
        ledger: LedgerEngine = opened
        desk = Desk(make_accounts(replace(ledger.balance(), facts=(LEARNER,)), verifiers_grade=True))

        def settle(decision: Any) -> Any:
            ledger.record(decision.transaction)
            return Desk.settle(desk, decision)

        desk.settle = settle  # type: ignore[method-assign]
        name = ungraded(desk)
        bare = present(ledger.group(0))
        assert ledger.balance().slots.open_ones[0].state is SlotState.UNGRADED
        whole = replace(bare, header=b"a header with rewards", columns=bare.columns + b" and rewards")
        put_grades(desk, whole)
        assert ledger.group(0) == whole
        assert desk.accounts.load().untrained_bytes == whole.size_bytes
    with open_ledger() as opened:
        again = make_accounts(opened.balance(), verifiers_grade=True)
        assert again.slots.open_slots[0].state is SlotState.SPOOLED
        assert again.spooled.at_s == {0: NOW_S}
        assert again.load() == desk.accounts.load()
        assert again.reward_checks.next(VerifierPlaces(1), NOW_S) is None
        assert name == "0.1"


# Whom a group is sent to, and when to the next.


def opened() -> RewardChecks:
    checks = RewardChecks(b"secret", most_held=64, most_owed_bytes=0, grades=True)
    checks.open()
    return checks


def draw(checks: RewardChecks, slot: int = 1) -> str:
    checks.draw(Held(slot, f"{slot}.1", "s1", NOW_S), share=1.0)
    return f"{slot}.1"


def patient() -> VerifierPlaces:
    return VerifierPlaces(64, is_patient=True)


def test_a_group_goes_to_another_verifier_once_the_first_is_silent_and_never_to_the_same_again() -> None:
    checks, first, second = opened(), patient(), patient()
    earlier, name = draw(checks), draw(checks, 2)
    for _ in range(2):
        checks.next(first, NOW_S)
    first.answer(earlier, NOW_S + HELD_S)
    checks.answered(earlier, NOW_S + HELD_S)
    assert first.out_of_patience(NOW_S + HELD_S + 1) == []  # it has answered for the one before
    for group_id in first.out_of_patience(NOW_S + 2 * HELD_S + 1):
        checks.offer(group_id)
    assert checks.next(first, NOW_S) is None
    assert present(checks.next(second, NOW_S)).group_id == name


def test_a_verifier_that_answers_for_other_groups_does_not_keep_one_for_ever() -> None:
    checks, first, second = opened(), patient(), patient()
    name = draw(checks)
    checks.next(first, NOW_S)
    for slot in range(2, 10):
        later = draw(checks, slot)
        checks.next(first, NOW_S + slot)
        first.answer(later, NOW_S + 7.0 * slot)
        checks.answered(later, NOW_S + 7.0 * slot)
    assert first.out_of_patience(NOW_S + HELD_S + 1) == [name]
    checks.offer(name)
    assert checks.next(second, NOW_S) is not None


def test_groups_that_are_graded_go_on_while_no_verifier_is_there() -> None:
    checks = opened()
    draw(checks)
    checks.close()
    assert checks.is_held(1)
    assert not checks.is_held(2)
    assert not checks.lacks_verifier
    assert checks.next(patient(), NOW_S) is not None


def test_however_many_groups_wait_for_grades_none_is_passed_over_and_others_have_room() -> None:
    checks = opened()
    for slot in range(100):
        draw(checks, slot)
    assert checks.passed_over == 0
    assert checks.must_wait("s1", is_vetted=True, now=NOW_S)
    assert not checks.must_wait("s2", is_vetted=False, now=NOW_S)


# The bytes.


def test_a_group_gets_its_grades_without_a_look_at_its_tokens(desk: Desk) -> None:
    (name,) = desk.lease()
    bare = without_grades(desk.answer(name))
    encoded = replace(group_to_wire(bare), sampler_id="s1", spooled_at_s=7.0)
    assert not group_from_wire(encoded).is_graded
    whole = graded(encoded, GRADES, grader_digest=b"g" * 16, at_s=9.0)
    assert whole.columns.startswith(encoded.columns)
    group = group_from_wire(whole)
    assert [one.reward for one in group.completions] == [0.25, 1.0]
    assert group.metrics["score"].tolist() == [1.0, 4.0]
    assert (group.graded_at_s, group.grader_digest, group.sampler_id) == (9.0, b"g" * 16, "s1")
    assert group.spooled_at_s == 7.0
