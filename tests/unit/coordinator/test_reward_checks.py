"""Which groups are checked, how long they are held back, and what findings prove."""

from dataclasses import replace

import pytest

from node.coordinator.work import trust
from node.coordinator.work.accounts import Balance
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.reward_checks import (
    FALSE_ALARM,
    HELD_GROUPS,
    HELD_S,
    LEAST_SHARE,
    MOST_TRIES,
    PROVEN_CHECKS,
    Held,
    RewardChecks,
    checked_share,
    is_proof,
    stake_after,
)
from node.coordinator.work.sampler_standing import Standing
from node.coordinator.work.slot_table import SlotBalance
from node.coordinator.work.slots import MAX_ATTEMPTS, SlotState, slot_and_attempt
from node.coordinator.work.trust import Checked
from node.errors import RefusedError
from node.rollout import RewardCheck, RewardFinding
from node.verdict import Verdict
from support.coordinator import LEARNER, NOW_S, Desk, make_accounts

WIDE = Bounds(
    concurrency_groups=64, buffer_groups=64, batch_groups=2, max_staleness_versions=50, buffer_bytes=1 << 20
)


def opened() -> RewardChecks:
    checks = RewardChecks(b"secret")
    checks.is_open = True
    return checks


def draw(checks: RewardChecks, slot: int, *, share: float = 1.0, now: float = NOW_S) -> None:
    checks.draw(slot, f"{slot}.1", "s1", share=share, now=now)


def find(desk: Desk, outcome: RewardCheck, *, noise_ratio: float = 0.0, sampler_id: str = "liar") -> Checked:
    """Settle a finding about the next group that waits for a check."""
    held = desk.accounts.reward_checks.next()
    assert held is not None
    assert held.sampler_id == sampler_id
    answered = desk.accounts.reward_checks.answered(held.group_id)
    assert answered == held
    finding = RewardFinding(held.group_id, outcome, "completion 0 claims 1")
    checked: Checked = desk.settle(
        trust.reward_checked(desk.accounts, held, finding, noise_ratio=noise_ratio, now=desk.now)
    )
    desk.accounts.reward_checks.let_go(held)
    return checked


@pytest.fixture
def desk() -> Desk:
    """Return a coordinator with a verifier, where every group is drawn and both samplers have leases."""
    desk = Desk(make_accounts(prompts=1000, bounds=WIDE))
    desk.accounts.reward_checks.is_open = True
    desk.accounts.standings.apply(Standing(name, allowance=100) for name in ("liar", "honest"))
    return desk


def spool(desk: Desk, sampler_id: str, n: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(RewardChecks, "_number", lambda self, group_id: 0.0)
    names = desk.lease(sampler_id, n)
    for name in names:
        assert desk.submit(name, sampler_id).verdict is Verdict.SPOOLED
    return names


def state_of(desk: Desk, name: str) -> SlotState:
    return desk.accounts.slots.open_slots[slot_and_attempt(name)[0]].state


def test_every_group_of_a_newcomer_is_drawn_and_never_none_of_a_proven_sampler() -> None:
    assert checked_share(0, 0) == checked_share(PROVEN_CHECKS, 0) == 1.0
    assert checked_share(2 * PROVEN_CHECKS, 0) == 0.125
    assert checked_share(1_000_000, 0) == LEAST_SHARE


def test_a_difference_takes_back_the_record_of_a_newcomer() -> None:
    assert checked_share(2 * PROVEN_CHECKS, 1) == 1.0
    assert checked_share(3 * PROVEN_CHECKS, 1) == 0.125


def test_an_honest_sampler_is_checked_in_15_of_its_first_hundred_groups() -> None:
    checks = 0.0
    for _ in range(100):
        checks += checked_share(int(checks), 0)
    assert checks == pytest.approx(15.0, abs=0.5)


@pytest.mark.parametrize("honest_groups", [0, 500])
def test_steady_lies_are_found_within_thirteen_groups_on_average(honest_groups: int) -> None:
    checks = 0.0
    for _ in range(honest_groups):
        checks += checked_share(int(checks), 0)
    assert 1.0 / checked_share(int(checks), 0) <= 13.0


def test_as_many_groups_are_drawn_as_the_share_says_and_others_with_another_secret() -> None:
    chosen = []
    for secret in (b"one", b"two"):
        checks = RewardChecks(secret)
        chosen.append({n for n in range(4000) if checks._number(f"{n}.1") < 0.25})
        assert len(chosen[-1]) == pytest.approx(1000, abs=100)
    assert len(chosen[0] & chosen[1]) == pytest.approx(250, abs=60)


def test_without_a_verifier_nothing_is_held_back() -> None:
    checks = RewardChecks(b"secret")
    draw(checks, 1)
    assert not checks.is_held(1)
    assert checks.next() is None


def test_a_group_is_held_until_what_was_found_is_settled() -> None:
    checks = opened()
    draw(checks, 1)
    held = checks.next()
    assert held == Held(1, "1.1", "s1", NOW_S)
    assert checks.answered("1.1") == held
    assert checks.is_held(1)
    checks.let_go(held)
    assert not checks.is_held(1)
    assert checks.answered("1.1") is None


def test_a_slot_whose_group_was_replaced_meanwhile_stays_held_for_the_new_one() -> None:
    checks = opened()
    draw(checks, 1)
    old = checks.next()
    assert old is not None
    checks.drop(1)
    checks.draw(1, "1.2", "s2", share=1.0, now=NOW_S)
    checks.let_go(old)
    assert checks.is_held(1)


def test_so_many_groups_are_held_and_no_more() -> None:
    checks = opened()
    for slot in range(HELD_GROUPS + 3):
        draw(checks, slot)
    assert len(checks) == HELD_GROUPS
    assert checks.passed_over == 3


def test_a_group_that_is_late_is_delivered_and_may_be_found_out_for_as_long_again() -> None:
    checks = opened()
    draw(checks, 1)
    draw(checks, 2)
    sent = checks.next()
    assert checks.late(NOW_S + HELD_S) == 0
    assert checks.late(NOW_S + HELD_S + 1) == 2
    assert not checks.is_held(1)
    assert checks.next() is None
    assert checks.late(NOW_S + HELD_S + 1) == 0
    assert checks.answered("1.1") == sent
    draw(checks, 3)
    checks.next()
    checks.late(NOW_S + 2 * HELD_S + 1)
    assert checks.answered("3.1") is None


def required() -> RewardChecks:
    return RewardChecks(b"secret", is_required=True)


def test_what_a_verifier_had_that_has_gone_is_checked_by_the_next_until_it_has_ended_several() -> None:
    checks = opened()
    draw(checks, 1)
    for tries in range(1, MOST_TRIES + 1):
        held = checks.next()
        assert held is not None
        assert held.tries == tries
        checks.left(["1.1"])
    assert checks.next() is None
    assert checks.is_held(1)
    assert checks.late(NOW_S + HELD_S + 1) == 1
    assert not checks.is_held(1)


def test_where_a_verifier_is_required_every_group_waits_for_one_and_the_drawn_ones_for_a_finding() -> None:
    checks = required()
    assert checks.lacks_verifier
    draw(checks, 1)
    draw(checks, 2, share=0.0)
    assert checks.is_held(1)
    assert checks.is_held(2)
    assert checks.late(NOW_S + 10 * HELD_S) == 0
    checks.is_open = True
    assert checks.is_held(1)
    assert not checks.is_held(2)
    sent = checks.next()
    assert sent is not None
    checks.answered(sent.group_id)
    checks.let_go(sent)
    assert not checks.is_held(1)


def test_a_required_check_is_asked_for_again_when_it_is_late_and_when_the_last_verifier_goes() -> None:
    checks = required()
    checks.is_open = True
    draw(checks, 1)
    sent = checks.next()
    assert sent is not None
    assert checks.next() is None
    assert checks.late(NOW_S + HELD_S + 1) == 0
    again = checks.next()
    assert again is not None
    assert again.group_id == "1.1"
    checks.close()
    assert checks.lacks_verifier
    assert checks.next() is not None


def test_a_required_check_whose_finding_never_came_to_disk_is_asked_for_again() -> None:
    """Its verifier went while the finding was being written, and the disk refused it."""
    checks = required()
    checks.is_open = True
    draw(checks, 1)
    assert checks.next() is not None
    assert checks.answered("1.1") is not None
    checks.late(NOW_S + HELD_S)
    assert checks.next() is None
    checks.late(NOW_S + HELD_S + 1)
    again = checks.next()
    assert again is not None
    assert again.group_id == "1.1"
    assert checks.is_held(1)


def test_a_late_answer_to_a_required_check_is_taken_and_the_group_is_not_sent_again() -> None:
    checks = required()
    checks.is_open = True
    draw(checks, 1)
    checks.next()
    checks.late(NOW_S + HELD_S + 1)
    answered = checks.answered("1.1")
    assert answered is not None
    checks.let_go(answered)
    assert not checks.is_held(1)
    assert checks.next() is None


def test_required_checks_are_never_passed_over_however_many_groups_are_held() -> None:
    checks = required()
    for slot in range(HELD_GROUPS + 3):
        draw(checks, slot)
    assert (len(checks), checks.passed_over) == (HELD_GROUPS + 3, 0)


def test_a_group_that_waited_for_a_required_check_before_a_restart_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(make_accounts(prompts=1000, bounds=WIDE, require_verifier=True))
    (name,) = spool(desk, "liar", 1, monkeypatch)
    slot, _ = slot_and_attempt(name)
    balance = Balance(slots=SlotBalance(tuple(desk.accounts.slots.open_slots.values()), next_slot=1))
    again = make_accounts(balance, prompts=1000, bounds=WIDE, require_verifier=True)
    again.reward_checks.is_open = True
    assert again.reward_checks.is_held(slot)
    held = again.reward_checks.next()
    assert held is not None
    assert (held.group_id, held.sampler_id) == (name, "liar")


def sent(desk: Desk) -> list[str]:
    """Send the learner all that it may be sent; return whose groups they are."""
    names = []
    while (slot := desk.accounts.next_undelivered()) is not None:
        names.append(slot.winning_holder)
    return names


def test_newcomers_fill_their_part_of_a_batch_while_a_proven_sampler_is_at_work(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = desk.accounts
    accounts.reward_checks.is_open = False
    accounts.terms = replace(accounts.terms, newcomers_part=0.5)  # one group of a batch of two
    accounts.standings.apply([Standing("honest", allowance=100, checks=PROVEN_CHECKS)])
    (leased,) = desk.lease("honest", 1)
    spool(desk, "liar", 3, monkeypatch)
    assert sent(desk) == ["liar"]
    assert accounts.waiting_newcomers() == 2
    desk.submit(leased, "honest")
    assert sent(desk)[0] == "honest"
    # Nobody but newcomers is at work now.
    assert accounts.waiting_newcomers() == 0
    assert len(accounts.slots.open.delivered()) == 4


def test_a_newcomers_groups_go_once_it_has_its_checks(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = desk.accounts
    accounts.terms = replace(accounts.terms, newcomers_part=0.5)
    accounts.standings.apply([Standing("other", allowance=100, checks=PROVEN_CHECKS)])
    desk.lease("other", 1)
    spool(desk, "honest", PROVEN_CHECKS + 2, monkeypatch)
    assert sent(desk) == []
    for _ in range(PROVEN_CHECKS - 1):
        find(desk, RewardCheck.AGREED, sampler_id="honest")
    assert sent(desk) == ["honest"]
    find(desk, RewardCheck.AGREED, sampler_id="honest")
    assert sent(desk) == ["honest"] * (PROVEN_CHECKS - 1)


def test_newcomers_alone_fill_whole_batches(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.accounts.reward_checks.is_open = False
    desk.accounts.terms = replace(desk.accounts.terms, newcomers_part=0.5)
    spool(desk, "liar", 4, monkeypatch)
    assert sent(desk) == ["liar"] * 4


@pytest.mark.parametrize("noise_ratio", [0.005, 0.02, 0.1])
@pytest.mark.parametrize(("stake", "checks"), [(0.0, 0), (3.5, 7), (1e-6, 4000)])
def test_a_fair_bet_wins_nothing_on_average_from_an_honest_sampler(
    noise_ratio: float, stake: float, checks: int
) -> None:
    after = {
        differs: stake_after(stake, checks=checks, differs=differs, noise_ratio=noise_ratio)
        for differs in (True, False)
    }
    mean = noise_ratio * after[True] + (1 - noise_ratio) * after[False]
    assert mean == pytest.approx(stake + 1 / ((checks + 1) * (checks + 2)))


def test_no_more_than_one_is_staked_in_a_whole_run() -> None:
    """With the fair bet this makes a false alarm, a stake of 100, at most one in a hundred runs (Ville)."""
    assert sum(1 / ((n + 1) * (n + 2)) for n in range(100_000)) <= 1.0
    assert not is_proof(0.999 / FALSE_ALARM)
    assert is_proof(1.001 / FALSE_ALARM)


def test_a_liar_is_proven_by_three_differences_and_after_a_long_honest_record_by_few_more() -> None:
    def differences_needed(stake: float, checks: int) -> int:
        for n in range(1, 50):
            stake = stake_after(stake, checks=checks + n - 1, differs=True, noise_ratio=0.02)
            if is_proof(stake):
                return n
        raise AssertionError(stake)

    stake = 0.0
    for checks in range(1000):
        stake = stake_after(stake, checks=checks, differs=False, noise_ratio=0.02)
    assert differences_needed(0.0, 0) == 3
    assert differences_needed(stake, 1000) == 7


def test_where_the_grader_is_deterministic_one_difference_is_proof() -> None:
    assert is_proof(stake_after(0.0, checks=0, differs=True, noise_ratio=0.0))
    assert not is_proof(stake_after(0.0, checks=0, differs=False, noise_ratio=0.0))


def test_a_held_group_is_passed_over_and_those_behind_it_are_delivered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = spool(desk, "honest", 2, monkeypatch)
    checks, slots = desk.accounts.reward_checks, desk.accounts.slots
    assert slots.next_undelivered(checks.is_held) is None
    checks.next()
    find(desk, RewardCheck.AGREED, sampler_id="honest")
    delivered = slots.next_undelivered(checks.is_held)
    assert delivered is not None
    assert delivered.number == slot_and_attempt(second)[0]
    assert slots.next_undelivered(checks.is_held) is None
    assert state_of(desk, first) is SlotState.SPOOLED


def test_a_proven_liar_loses_its_leases_and_untrained_groups_and_nobody_else_any(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies = spool(desk, "liar", 3, monkeypatch)
    true = spool(desk, "honest", 2, monkeypatch)
    leased = desk.lease("liar", 2)
    checked = find(desk, RewardCheck.DISAGREED)
    assert {verdict.group_id for verdict in checked.thrown_out} == set(lies)
    assert {verdict.verdict for verdict in checked.thrown_out} == {Verdict.SUSPECT}
    assert "in 1 of 1 checks: completion 0 claims 1" in checked.proof
    assert {state_of(desk, name) for name in (*lies, *leased)} == {SlotState.AVAILABLE}
    assert {state_of(desk, name) for name in true} == {SlotState.SPOOLED}
    assert desk.accounts.verdicts_of("liar")[Verdict.SUSPECT] == 3
    assert not any(desk.accounts.reward_checks.is_held(slot_and_attempt(name)[0]) for name in lies)
    refused = desk.ask("liar", 4)
    assert (refused.leases, refused.waits_for) == ((), "quarantine")
    assert desk.submit(leased[0], "liar").verdict is Verdict.SUSPECT
    assert desk.lease("honest", 1)


def test_a_step_record_on_its_way_is_taken_though_its_group_was_thrown_out_after_the_last_attempt(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner trains on the group while a verifier proves that its sampler lies."""
    (lease,) = desk.lease("honest")
    for _ in range(MAX_ATTEMPTS - 1):
        desk.expire(after_s=1e4)
        (lease,) = desk.lease("liar")
    monkeypatch.setattr(RewardChecks, "_number", lambda self, group_id: 0.0)
    assert desk.submit(lease, "liar").verdict is Verdict.SPOOLED
    find(desk, RewardCheck.DISAGREED)
    assert desk.accounts.standings.of("liar").is_proven_liar
    number = slot_and_attempt(lease)[0]
    assert number not in desk.accounts.slots.open_slots  # nobody samples it once more
    outcome = desk.train(1, lease)
    assert outcome.refusal is None
    assert desk.accounts.last_step == 1
    assert desk.accounts.slots.counts()[SlotState.TRAINED] == 1


def test_only_an_operator_forgives_a_proven_liar(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    spool(desk, "liar", 1, monkeypatch)
    find(desk, RewardCheck.DISAGREED)
    desk.settle(trust.quarantine(desk.accounts, "liar", "", now=desk.now))
    assert desk.accounts.standings.of("liar").is_proven_liar
    desk.now += 1e6
    assert desk.lease("liar") == []
    desk.settle(trust.pardon(desk.accounts, {"liar"}))
    assert desk.lease("liar")
    assert desk.accounts.standings.of("liar").checks == 0


def test_a_difference_that_noise_explains_costs_the_group_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = spool(desk, "liar", 2, monkeypatch)
    checked = find(desk, RewardCheck.DISAGREED, noise_ratio=0.02)
    assert [verdict.group_id for verdict in checked.thrown_out] == [first]
    assert checked.proof == ""
    assert state_of(desk, second) is SlotState.SPOOLED
    standing = desk.accounts.standings.of("liar")
    assert (standing.checks, standing.differing, standing.quarantine) == (1, 1, "")


def test_a_group_that_cannot_be_graded_is_thrown_out_as_refused_and_proves_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = spool(desk, "liar", 1, monkeypatch)
    before = desk.accounts.standings.of("liar")
    assert [one.group_id for one in find(desk, RewardCheck.UNGRADABLE).thrown_out] == [name]
    assert desk.accounts.standings.of("liar") == before.after_refusal(now=desk.now)


def test_a_check_that_could_not_be_made_changes_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = spool(desk, "liar", 1, monkeypatch)
    before = desk.accounts.standings.of("liar")
    assert find(desk, RewardCheck.SKIPPED) == Checked("liar")
    assert desk.accounts.standings.of("liar") == before
    assert state_of(desk, name) is SlotState.SPOOLED
    assert not desk.accounts.reward_checks.is_held(slot_and_attempt(name)[0])


def test_a_lie_that_is_found_late_is_held_against_its_sampler_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = spool(desk, "liar", 1, monkeypatch)
    held = desk.accounts.reward_checks.next()
    assert held is not None
    desk.train(1, name)
    finding = RewardFinding(name, RewardCheck.DISAGREED, "late")
    checked = desk.settle(trust.reward_checked(desk.accounts, held, finding, noise_ratio=0.0, now=desk.now))
    assert checked == Checked("liar", (), "its rewards are not its grader's in 1 of 1 checks: late")


@pytest.mark.parametrize("outcome", [RewardCheck.UNGRADABLE, RewardCheck.DISAGREED])
def test_a_group_that_the_learner_has_is_not_sampled_again_for_a_finding_that_proves_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, outcome: RewardCheck
) -> None:
    (name,) = spool(desk, "liar", 1, monkeypatch)
    checks = desk.accounts.reward_checks
    held = checks.next()
    assert held is not None
    assert checks.late(desk.now + HELD_S + 1) == 1
    assert desk.accounts.slots.next_undelivered(checks.is_held) is not None
    before = desk.accounts.standings.of("liar")
    finding = RewardFinding(name, outcome, "late")
    assert desk.settle(
        trust.reward_checked(desk.accounts, held, finding, noise_ratio=0.02, now=desk.now)
    ) == Checked("liar")
    assert state_of(desk, name) is SlotState.SPOOLED
    assert desk.accounts.standings.of("liar") != before


def test_a_finding_that_was_lost_has_its_group_checked_again_before_it_is_delivered() -> None:
    checks = opened()
    draw(checks, 1)
    held = checks.next()
    assert held is not None
    checks.answered("1.1")
    checks.ask_again(held)
    assert checks.is_held(1)
    assert checks.next() == held
    checks.answered("1.1")
    assert checks.late(NOW_S + HELD_S + 1) == 1
    checks.ask_again(held)
    assert checks.next() is None


def test_what_was_found_is_settled_before_the_group_goes_although_the_last_verifier_has_gone() -> None:
    checks = opened()
    draw(checks, 1)
    draw(checks, 2)
    held = checks.next()
    assert held is not None
    checks.answered("1.1")
    checks.forget()
    assert [checks.is_held(slot) for slot in (1, 2)] == [True, False]
    checks.is_open = False
    checks.ask_again(held)
    assert not checks.is_held(1)


def test_a_clock_that_is_set_back_holds_no_group_for_longer() -> None:
    checks = opened()
    for slot in (1, 2, 3):
        draw(checks, slot, now=NOW_S + 1e6)
    checks.next()
    checks.next()
    checks.answered("1.1")
    checks.bound_times(NOW_S)
    assert checks.late(NOW_S + HELD_S + 1) == 3


def test_going_back_to_the_ledger_lets_every_group_go(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = spool(desk, "honest", 1, monkeypatch)
    checks = desk.accounts.reward_checks
    assert checks.is_held(slot_and_attempt(name)[0])
    desk.accounts.go_back(Balance(learner=LEARNER), now=desk.now)
    assert len(checks) == 0
    assert checks.is_open


def test_newcomers_wait_while_too_many_groups_are_held_and_proven_samplers_do_not(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,), (second,) = desk.lease("liar", 1), desk.lease("honest", 1)
    desk.accounts.standings.apply([Standing("honest", allowance=100, checks=PROVEN_CHECKS)])
    monkeypatch.setattr(RewardChecks, "is_full", True)
    with pytest.raises(RefusedError, match="too many groups wait for a check"):
        desk.submit(first, "liar")
    assert desk.submit(second, "honest").verdict is Verdict.SPOOLED
    assert not desk.accounts.reward_checks.is_held(slot_and_attempt(second)[0])
