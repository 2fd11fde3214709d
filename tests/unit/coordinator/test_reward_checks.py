"""Which groups are checked, how long they are held back, and what findings prove."""

from dataclasses import replace

import pytest

from node.coordinator.work.balance import Balance
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.checks.open_checks import OWED_GROUPS
from node.coordinator.work.checks.reward_checks import HELD_S, MOST_TRIES, RewardChecks
from node.coordinator.work.checks.verifier_places import VerifierPlaces
from node.coordinator.work.decisions import findings, trust
from node.coordinator.work.decisions.findings import Checked, GroupFinding
from node.coordinator.work.decisions.trust import Quarantine
from node.coordinator.work.samplers.sampler_standing import (
    FALSE_ALARM,
    LEAST_SHARE,
    PROVEN_CHECKS,
    Standing,
    checked_share,
    is_proof,
    stake_after,
)
from node.coordinator.work.slots.slot import (
    MAX_ATTEMPTS,
    Attempt,
    Slot,
    SlotBalance,
    SlotState,
    slot_and_attempt,
)
from node.errors import Reason
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.verdict import Verdict
from support.coordinator import LEARNER, NOW_S, Desk, make_accounts
from support.present import present
from support.refusals import refused

WIDE = Bounds(
    concurrency_groups=64, buffer_groups=64, batch_groups=2, max_staleness_versions=50, buffer_bytes=1 << 20
)


ROOM = 64


def opened(*, most_held: int = ROOM, is_required: bool = False) -> RewardChecks:
    checks = RewardChecks(b"secret", most_held=most_held, most_owed_bytes=1 << 20, is_required=is_required)
    checks.open()
    return checks


def required() -> RewardChecks:
    return RewardChecks(b"secret", most_held=ROOM, most_owed_bytes=1 << 20, is_required=True)


def draw(checks: RewardChecks, slot: int, name: str = "s1", *, share: float = 1.0, now: float = NOW_S) -> str:
    group_id = f"{slot}.1"
    checks.draw(Held(slot, group_id, name, now, size_bytes=10), share=share)
    return group_id


def verifier(checks: RewardChecks, *, places: int = 64) -> VerifierPlaces:
    one = VerifierPlaces(places)
    one.send("known", "s1", NOW_S)
    one.answer("known", NOW_S)
    checks.verifiers.add(one)
    return one


def gone(checks: RewardChecks, one: VerifierPlaces) -> None:
    checks.verifiers.discard(one)
    checks.left(one.group_ids)


def answer(checks: RewardChecks, one: VerifierPlaces, name: str, now: float = NOW_S) -> Held | None:
    assert one.answer(name, now)
    return checks.answered(name, now)


def find(desk: Desk, outcome: RewardCheck, *, noise_ratio: float = 0.0, sampler_id: str = "liar") -> Checked:
    """Settle a finding about the next group that waits for a check."""
    checks, places = desk.accounts.reward_checks, VerifierPlaces(64)
    while (held := checks.next(places, desk.now)) is not None and held.sampler_id != sampler_id:
        pass
    assert held is not None
    checks.left(name for name in places.group_ids if name != held.group_id)
    answered = desk.accounts.reward_checks.answered(held.group_id, desk.now)
    assert answered == held
    finding = RewardFinding(held.group_id, outcome, "completion 0 claims 1")
    checked: Checked = desk.settle(
        findings.found(desk.accounts, GroupFinding(held, finding, noise_ratio), now=desk.now)
    )
    desk.accounts.reward_checks.let_go(held)
    return checked


@pytest.fixture
def desk() -> Desk:
    """Return a coordinator with a verifier, where every group is drawn and both samplers have leases."""
    desk = Desk(make_accounts(prompts=1000, bounds=WIDE))
    desk.accounts.reward_checks.open()
    desk.trust("liar", "honest")
    return desk


def spool(desk: Desk, sampler_id: str, n: int) -> list[str]:
    """Submit groups of a sampler that has too few checks for any to be passed over."""
    names = desk.lease(sampler_id, n)
    for name in names:
        assert desk.submit(name, sampler_id).verdict is Verdict.SPOOLED
    return names


def state_of(desk: Desk, name: str) -> SlotState:
    return desk.accounts.slots.open_slots[slot_and_attempt(name)[0]].state


@pytest.mark.parametrize(
    ("checks", "differing", "share"),
    [
        *((0, 0, 1.0), (PROVEN_CHECKS, 0, 1.0), (2 * PROVEN_CHECKS, 0, 0.125), (1_000_000, 0, LEAST_SHARE)),
        *((2 * PROVEN_CHECKS, 1, 1.0), (3 * PROVEN_CHECKS, 1, 0.125)),  # one takes back a newcomer's record
    ],
)
def test_every_group_of_a_newcomer_is_drawn_and_never_none_of_a_proven_sampler(
    checks: int, differing: int, share: float
) -> None:
    assert checked_share(checks, differing) == share


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
        checks = RewardChecks(secret, most_held=10_000, most_owed_bytes=0)
        checks.open()
        for n in range(4000):
            draw(checks, n, share=0.25)
        chosen.append({n for n in range(4000) if checks.is_held(n)})
        assert len(chosen[-1]) == pytest.approx(1000, abs=100)
    assert len(chosen[0] & chosen[1]) == pytest.approx(250, abs=60)


def test_in_a_run_that_never_had_a_verifier_nothing_is_held_back_or_owed() -> None:
    checks = RewardChecks(b"secret", most_held=ROOM, most_owed_bytes=1 << 20)
    draw(checks, 1)
    assert not checks.is_held(1)
    assert checks.next(verifier(checks), NOW_S) is None
    assert (checks.owed, checks.passed_over) == (0, 0)


def test_a_slot_whose_group_was_replaced_meanwhile_stays_held_for_the_new_one() -> None:
    checks = opened()
    draw(checks, 1)
    old = present(checks.next(verifier(checks), NOW_S))
    checks.drop(1)
    checks.draw(Held(1, "1.2", "s2", NOW_S), share=1.0)
    checks.let_go(old)
    assert checks.is_held(1)


def test_a_sampler_has_as_many_groups_held_as_there_is_room_left_and_others_have_theirs() -> None:
    checks = opened(most_held=12)
    for slot in range(12):
        draw(checks, slot, "slow")
    assert (len(checks), checks.passed_over, checks.owed) == (6, 6, 6)
    draw(checks, 20, "quick")
    assert checks.is_held(20)


@pytest.mark.parametrize(
    ("is_vetted", "is_required", "waits"),
    [(False, False, True), (True, False, False), (True, True, True), (False, True, True)],
)
def test_whoever_is_at_its_bound_waits_for_its_own_checks_and_nobody_else_does(
    is_vetted: bool, is_required: bool, waits: bool
) -> None:
    checks = opened(most_held=4, is_required=is_required)
    for slot in range(2):
        draw(checks, slot, "slow")
    assert checks.must_wait("slow", is_vetted=is_vetted, now=NOW_S) is waits
    assert not checks.must_wait("quick", is_vetted=False, now=NOW_S)


def test_a_proven_sampler_whose_groups_are_dear_waits_as_well() -> None:
    checks = opened(most_held=4)
    one = verifier(checks)
    for slot, name, took_s in ((1, "slow", 20.0), (2, "quick", 0.1)):
        draw(checks, slot, name)
        held = present(checks.next(one, NOW_S))
        assert one.answer(held.group_id, NOW_S + took_s)
        checks.let_go(held)
    for slot in (3, 4):
        draw(checks, slot, "slow")
        draw(checks, slot + 10, "quick")
    assert checks.must_wait("slow", is_vetted=True, now=NOW_S + 21)
    assert not checks.must_wait("quick", is_vetted=True, now=NOW_S + 21)


def test_no_group_goes_on_because_its_check_is_slow() -> None:
    checks = opened()
    draw(checks, 1)
    draw(checks, 2)
    one = verifier(checks, places=1)
    checks.next(one, NOW_S)
    checks.turn(NOW_S + 100 * HELD_S)
    assert checks.is_held(1)
    assert checks.is_held(2)


def test_what_a_verifier_had_that_has_gone_is_checked_by_the_next_until_it_has_ended_several() -> None:
    checks = opened()
    draw(checks, 1)
    for tries in range(MOST_TRIES):
        one = verifier(checks)
        held = present(checks.next(one, NOW_S))
        assert held.tries == tries
        gone(checks, one)
    assert [held.group_id for held in checks.hopeless(NOW_S)] == ["1.1"]
    assert checks.is_held(1)  # until it is thrown out
    assert checks.next(verifier(checks), NOW_S) is None
    assert checks.hopeless(NOW_S) == []


def test_another_verifier_is_asked_about_a_group_and_whichever_answers_first_decides() -> None:
    checks = opened()
    name = draw(checks, 1)
    hung, healthy = verifier(checks), verifier(checks)
    checks.next(hung, NOW_S)
    assert checks.next(healthy, NOW_S) is None
    checks.offer(name)
    assert checks.next(hung, NOW_S) is None
    assert checks.next(healthy, NOW_S) is not None
    held = present(answer(checks, healthy, name))
    assert held.tries == 0
    assert answer(checks, hung, name) is None
    checks.let_go(held)
    assert not checks.is_held(1)


def test_a_late_check_is_held_against_a_sampler_once_every_verifier_is_late_with_it() -> None:
    checks = opened()
    name = draw(checks, 1)
    first, second = verifier(checks), verifier(checks)
    checks.next(first, NOW_S)
    assert checks.turned_late(name) is None
    checks.offer(name)
    checks.next(second, NOW_S)
    assert checks.turned_late(name) is not None
    assert checks.turned_late(name) is None  # once
    assert checks.is_held(1)
    for _ in range(MOST_TRIES * 2 - 3):
        checks.turned_late(name)
    assert [held.group_id for held in checks.hopeless(NOW_S)] == [name]


def test_without_a_verifier_that_answers_groups_are_delivered_and_checked_afterwards() -> None:
    checks = opened()
    draw(checks, 1)
    one = verifier(checks)
    checks.next(one, NOW_S)
    draw(checks, 2)
    checks.close()
    draw(checks, 3)
    assert not any(map(checks.is_held, (1, 2, 3)))
    assert (checks.owed, checks.passed_over) == (3, 3)
    checks.open()
    draw(checks, 4)
    sent = [held.slot for _ in range(3) if (held := checks.next(one, NOW_S)) is not None]
    assert sent == [4, 2, 3]  # the held one first; 1 is there
    assert answer(checks, one, "1.1") is not None


def test_what_is_owed_is_bounded_by_groups_and_bytes_and_shared_out_by_sampler() -> None:
    checks = opened()
    checks.close()
    for slot in range(OWED_GROUPS):
        draw(checks, slot, "liar")
    draw(checks, 5000, "quick")
    assert checks.owed == OWED_GROUPS // 2 + 1
    assert checks.unkept == OWED_GROUPS // 2
    by_bytes = RewardChecks(b"secret", most_held=8, most_owed_bytes=45)
    by_bytes.has_had_verifier = True
    for slot in range(5):
        draw(by_bytes, slot)
    assert by_bytes.owed == 2


def consumed(slot: int) -> Slot:
    return Slot(slot, 0, SlotState.TRAINED, (Attempt(1, "s1", True),), 1, 1)


def test_the_bytes_of_what_is_owed_are_kept_and_no_others() -> None:
    checks = opened()
    draw(checks, 1)
    checks.close()
    draw(checks, 2)
    assert checks.kept([consumed(2), consumed(3), replace(consumed(1), winner=2)]) == {2}
    checks.drop(2, is_consumed=True)
    assert checks.owed == 2
    one = verifier(checks)
    while checks.next(one, NOW_S) is not None:
        pass
    held = present(answer(checks, one, "2.1"))
    assert checks.kept([consumed(2)]) == frozenset()
    checks.let_go(held)
    checks.drop(1)  # the learner refused it
    assert checks.owed == 0


def test_what_is_owed_when_the_process_ends_is_checked_after_the_next_start() -> None:
    checks = RewardChecks(b"other", most_held=ROOM, most_owed_bytes=1 << 20)
    checks.restore([Held(7, "7.1", "s1", NOW_S, prompt_index=3, size_bytes=10)])
    checks.open()
    held = present(checks.next(verifier(checks), NOW_S))
    assert (held.group_id, held.prompt_index) == ("7.1", 3)
    assert not checks.is_held(7)


def test_where_a_verifier_is_required_every_group_waits_for_one_and_the_drawn_ones_for_a_finding() -> None:
    checks = required()
    assert checks.lacks_verifier
    draw(checks, 1)
    draw(checks, 2, share=0.0)
    assert checks.is_held(1)
    assert checks.is_held(2)
    checks.turn(NOW_S + 10 * HELD_S)
    checks.open()
    assert checks.is_held(1)
    assert not checks.is_held(2)
    one = verifier(checks)
    sent = present(checks.next(one, NOW_S))
    answer(checks, one, sent.group_id)
    checks.let_go(sent)
    assert not checks.is_held(1)


def test_a_required_check_is_asked_for_again_when_the_last_verifier_goes() -> None:
    checks = required()
    checks.open()
    draw(checks, 1)
    one = verifier(checks)
    assert checks.next(one, NOW_S) is not None
    gone(checks, one)
    checks.close()
    assert checks.lacks_verifier
    assert checks.next(verifier(checks), NOW_S) is not None


def test_a_check_whose_finding_never_came_to_disk_is_asked_for_again() -> None:
    """Its verifier went while the finding was being written, and the disk refused it."""
    checks = opened()
    draw(checks, 1)
    one = verifier(checks)
    checks.next(one, NOW_S)
    assert answer(checks, one, "1.1") is not None
    checks.turn(NOW_S + HELD_S)
    assert checks.next(one, NOW_S) is None
    checks.turn(NOW_S + HELD_S + 1)
    assert present(checks.next(one, NOW_S)).group_id == "1.1"
    assert checks.is_held(1)


def test_required_checks_are_never_passed_over_however_many_groups_are_held() -> None:
    checks = required()
    for slot in range(ROOM + 3):
        draw(checks, slot)
    assert (len(checks), checks.passed_over) == (ROOM + 3, 0)


def test_a_group_that_waited_for_a_required_check_before_a_restart_is_drawn_again() -> None:
    desk = Desk(make_accounts(prompts=1000, bounds=WIDE, require_verifier=True))
    (name,) = spool(desk, "liar", 1)
    slot, _ = slot_and_attempt(name)
    balance = Balance(slots=SlotBalance(tuple(desk.accounts.slots.open_slots.values()), next_slot=1))
    again = make_accounts(balance, prompts=1000, bounds=WIDE, require_verifier=True)
    again.reward_checks.open()
    assert again.reward_checks.is_held(slot)
    held = present(again.reward_checks.next(VerifierPlaces(1), NOW_S))
    assert (held.group_id, held.sampler_id) == (name, "liar")


def sent(desk: Desk) -> list[str]:
    """Send the learner all that it may be sent; return whose groups they are."""
    names = []
    while (slot := desk.accounts.next_undelivered()) is not None:
        names.append(slot.winning_holder)
    return names


def test_newcomers_fill_their_part_of_a_batch_while_a_proven_sampler_is_at_work(desk: Desk) -> None:
    accounts = desk.accounts
    accounts.reward_checks.close()
    accounts.terms = replace(accounts.terms, newcomers_part=0.5)  # one group of a batch of two
    accounts.standings.apply(Standing("honest", allowance=100, checks=PROVEN_CHECKS))
    (leased,) = desk.lease("honest", 1)
    spool(desk, "liar", 3)
    assert sent(desk) == ["liar"]
    assert accounts.waiting_newcomers() == 2
    desk.submit(leased, "honest")
    assert sent(desk)[0] == "honest"
    # Nobody but newcomers is at work now.
    assert accounts.waiting_newcomers() == 0
    assert len(accounts.slots.open.delivered()) == 4


def test_a_newcomers_groups_go_once_it_has_its_checks(desk: Desk) -> None:
    accounts = desk.accounts
    accounts.terms = replace(accounts.terms, newcomers_part=0.5)
    accounts.standings.apply(Standing("other", allowance=100, checks=PROVEN_CHECKS))
    desk.lease("other", 1)
    spool(desk, "honest", PROVEN_CHECKS + 2)
    assert sent(desk) == []
    for _ in range(PROVEN_CHECKS - 1):
        find(desk, RewardCheck.AGREED, sampler_id="honest")
    assert sent(desk) == ["honest"]
    find(desk, RewardCheck.AGREED, sampler_id="honest")
    assert sent(desk) == ["honest"] * (PROVEN_CHECKS - 1)


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


def test_a_held_group_is_passed_over_and_those_behind_it_are_delivered(desk: Desk) -> None:
    first, second = spool(desk, "honest", 2)
    checks, slots = desk.accounts.reward_checks, desk.accounts.slots
    assert slots.open.next_undelivered(checks.is_held) is None
    find(desk, RewardCheck.AGREED, sampler_id="honest")
    assert present(slots.open.next_undelivered(checks.is_held)).number == slot_and_attempt(first)[0]
    assert slots.open.next_undelivered(checks.is_held) is None
    assert state_of(desk, second) is SlotState.SPOOLED


def test_a_step_record_on_its_way_is_taken_though_its_group_was_thrown_out_after_the_last_attempt(
    desk: Desk,
) -> None:
    """The learner trains on the group while a verifier proves that its sampler lies."""
    (lease,) = desk.lease("honest")
    for _ in range(MAX_ATTEMPTS - 1):
        desk.expire(after_s=1e4)
        (lease,) = desk.lease("liar")
    assert desk.submit(lease, "liar").verdict is Verdict.SPOOLED
    find(desk, RewardCheck.DISAGREED)
    assert desk.accounts.standings.of("liar").is_proven_liar
    number = slot_and_attempt(lease)[0]
    assert number not in desk.accounts.slots.open_slots  # nobody samples it once more
    outcome = desk.train(1, lease)
    assert outcome.refusal is None
    assert desk.accounts.last_step == 1
    assert desk.accounts.slots.counts()[SlotState.TRAINED] == 1


def test_only_an_operator_forgives_a_proven_liar(desk: Desk) -> None:
    spool(desk, "liar", 1)
    find(desk, RewardCheck.DISAGREED)
    desk.settle(trust.quarantine(desk.accounts, Quarantine("liar", ""), now=desk.now))
    assert desk.accounts.standings.of("liar").is_proven_liar
    desk.now += 1e6
    assert desk.lease("liar") == []
    desk.settle(trust.pardon(desk.accounts, {"liar"}, now=desk.now))
    assert desk.lease("liar")
    assert desk.accounts.standings.of("liar").checks == 0


def test_a_difference_that_noise_explains_costs_the_group_alone(desk: Desk) -> None:
    first, second = spool(desk, "liar", 2)
    checked = find(desk, RewardCheck.DISAGREED, noise_ratio=0.02)
    assert [verdict.group_id for verdict in checked.thrown_out] == [first]
    assert checked.proof == ""
    assert state_of(desk, second) is SlotState.SPOOLED
    standing = desk.accounts.standings.of("liar")
    assert (standing.checks, standing.differing, standing.quarantine) == (1, 1, "")


def test_a_group_that_cannot_be_graded_is_thrown_out_as_refused_and_proves_nothing(desk: Desk) -> None:
    (name,) = spool(desk, "liar", 1)
    before = desk.accounts.standings.of("liar")
    assert [one.group_id for one in find(desk, RewardCheck.UNGRADABLE).thrown_out] == [name]
    assert desk.accounts.standings.of("liar") == before.after_refusal(now=desk.now)


def test_a_check_that_could_not_be_made_changes_nothing(desk: Desk) -> None:
    (name,) = spool(desk, "liar", 1)
    before = desk.accounts.standings.of("liar")
    skipped = find(desk, RewardCheck.SKIPPED)
    assert (skipped.thrown_out, skipped.proof) == ((), "")
    assert desk.accounts.standings.of("liar") == before
    assert state_of(desk, name) is SlotState.SPOOLED
    assert not desk.accounts.reward_checks.is_held(slot_and_attempt(name)[0])


@pytest.mark.parametrize("outcome", [RewardCheck.UNGRADABLE, RewardCheck.DISAGREED])
def test_a_group_that_the_learner_has_is_not_sampled_again_for_a_finding_that_proves_nothing(
    desk: Desk, outcome: RewardCheck
) -> None:
    (name,) = spool(desk, "liar", 1)
    checks = desk.accounts.reward_checks
    held = present(checks.next(VerifierPlaces(1), desk.now))
    checks.close()
    assert desk.accounts.slots.open.next_undelivered(checks.is_held) is not None
    before = desk.accounts.standings.of("liar")
    finding = RewardFinding(name, outcome, "late")
    checked = desk.settle(findings.found(desk.accounts, GroupFinding(held, finding, 0.02), now=desk.now))
    assert (checked.thrown_out, checked.proof) == ((), "")
    assert state_of(desk, name) is SlotState.SPOOLED
    assert desk.accounts.standings.of("liar") != before


def test_what_was_found_is_settled_before_the_group_goes_although_the_last_verifier_has_gone() -> None:
    checks = opened()
    draw(checks, 1)
    draw(checks, 2)
    one = verifier(checks)
    checks.next(one, NOW_S)
    answer(checks, one, "1.1")
    checks.close()
    assert [checks.is_held(slot) for slot in (1, 2)] == [True, False]


def test_a_clock_that_is_set_back_puts_no_check_off_for_longer() -> None:
    checks = opened()
    draw(checks, 1, now=NOW_S + 1e6)
    one = verifier(checks)
    checks.next(one, NOW_S + 1e6)
    answer(checks, one, "1.1", NOW_S + 1e6)
    checks.bound_times(NOW_S)
    checks.turn(NOW_S + HELD_S + 1)
    assert checks.next(one, NOW_S) is not None


def test_going_back_to_the_ledger_lets_every_group_go(desk: Desk) -> None:
    (name,) = spool(desk, "honest", 1)
    checks = desk.accounts.reward_checks
    assert checks.is_held(slot_and_attempt(name)[0])
    desk.accounts.go_back(Balance(facts=(LEARNER,)), now=desk.now)
    assert len(checks) == 0
    assert checks.is_open


def test_a_newcomer_is_leased_as_much_as_it_may_have_held_and_waits_for_its_own_checks(desk: Desk) -> None:
    grant = desk.ask("liar", 40)
    assert (len(grant.leases), grant.waits_for) == (16, "checks")  # half of 32
    for lease in grant.leases:
        assert desk.submit(lease.lease_id, "liar").verdict is Verdict.SPOOLED
    refused = desk.ask("liar", 1)
    assert (refused.leases, refused.waits_for) == ((), "checks")
    (others,) = desk.lease("honest", 1)
    assert desk.submit(others, "honest").verdict is Verdict.SPOOLED
    find(desk, RewardCheck.AGREED, sampler_id="honest")
    for _ in range(2):
        find(desk, RewardCheck.AGREED)
    assert len(desk.ask("liar", 9).leases) == 2


def test_what_was_leased_before_others_came_waits_at_its_sampler_once_the_room_is_shared(desk: Desk) -> None:
    leased = desk.lease("liar", 16)
    for name in desk.lease("honest", 10):
        assert desk.submit(name, "honest").verdict is Verdict.SPOOLED
    for name in leased[:11]:
        assert desk.submit(name, "liar").verdict is Verdict.SPOOLED
    with refused(Reason.BUSY, "11 groups", "liar"):
        desk.submit(leased[11], "liar")
    find(desk, RewardCheck.AGREED, sampler_id="honest")
    find(desk, RewardCheck.AGREED)
    assert desk.submit(leased[11], "liar").verdict is Verdict.SPOOLED


def test_a_lie_that_was_trained_on_unchecked_is_proof_when_it_is_found(desk: Desk) -> None:
    desk.accounts.reward_checks.close()
    lie, waiting = spool(desk, "liar", 2)
    assert sent(desk) == ["liar"] * 2
    desk.train(1, lie)
    desk.accounts.reward_checks.open()
    checked = find(desk, RewardCheck.DISAGREED)
    assert checked.proof
    assert [one.group_id for one in checked.thrown_out] == [waiting]
    assert desk.transactions[-1].freed == (slot_and_attempt(lie)[0],)
    assert desk.accounts.standings.of("liar").is_proven_liar
