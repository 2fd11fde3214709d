"""Ledger and learner must tell one history: who is behind whom is found before anything is taken."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from node.coordinator.work.balance import Balance
from node.coordinator.work.capacity import capacities
from node.coordinator.work.decisions import judged_groups, leasing, step_history
from node.coordinator.work.decisions.leasing import LeaseRequest
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.slots.slot import Attempt, Slot, SlotBalance, SlotState
from node.coordinator.work.slots.slot_generations import Generation
from node.errors import Reason
from node.values.groups.rollout import LeaseGrant
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.policy import PolicyVersion
from node.values.run import StepRecord
from support.coordinator import LEARNER, NOW_S, Desk, make_accounts
from support.refusals import refused


@pytest.fixture
def desk() -> Desk:
    return Desk()


def join(desk: Desk, **changes: object) -> None:
    joining = replace(LEARNER, **changes)  # type: ignore[arg-type]
    desk.settle(step_history.learner_joins(desk.accounts, joining, now=desk.now))


def train_to(desk: Desk, version: int) -> None:
    """Make versions of no groups."""
    for number in range(desk.accounts.last_step + 1, version + 1):
        desk.train(number)


def records(*versions: int) -> tuple[StepRecord, ...]:
    return tuple(StepRecord(version, (), ()) for version in versions)


def opened(
    desk: Desk,
    *,
    node_id: str = "learner",
    epoch: int = 1,
    version: int,
    steps: Iterable[StepRecord] = (),
    held: Iterable[str] = (),
) -> step_history.Outcome:
    hello = Hello(node_id, epoch, version, tuple(steps), tuple(held))
    outcome: step_history.Outcome = desk.settle(step_history.drain_opens(desk.accounts, hello, now=desk.now))
    return outcome


def refusal_of(outcome: step_history.Outcome) -> tuple[Reason, str]:
    assert outcome.refusal is not None
    return outcome.refusal.reason, str(outcome.refusal)


def lease(desk: Desk) -> LeaseGrant:
    return leasing.lease(desk.accounts, LeaseRequest("s1", 1, PolicyVersion(99)), now=desk.now).answer


def test_the_first_learners_model_becomes_the_runs() -> None:
    desk = Desk(make_accounts(Balance()))
    join(desk, vocabulary_size=1)
    assert desk.accounts.learner == replace(LEARNER, vocabulary_size=1)


def test_a_learner_that_comes_back_keeps_its_place(desk: Desk) -> None:
    join(desk)
    train_to(desk, 5)
    join(desk, epoch=2, version=6)  # its newest record is about to come
    assert desk.accounts.learner == replace(LEARNER, epoch=2, version=5)


@pytest.mark.parametrize(
    ("node_id", "epoch", "version", "reason"),
    [
        ("learner", 1, 5, Reason.FENCED),
        ("other", 2, 5, Reason.FENCED),
        ("learner", 3, 5, Reason.NOT_JOINED),
        ("learner", 2, 4, Reason.ROLLBACK),
    ],
)
def test_only_the_runs_learner_drains_and_only_from_its_newest_checkpoint(
    desk: Desk, node_id: str, epoch: int, version: int, reason: Reason
) -> None:
    join(desk, epoch=2)
    train_to(desk, 5)
    with refused(reason):
        opened(desk, node_id=node_id, epoch=epoch, version=version)


@pytest.mark.parametrize(
    ("version", "steps"), [(5, ()), (5, records(5)), (6, records(6)), (8, records(4, 5, 6, 7, 8))]
)
def test_a_learner_whose_records_reach_back_to_the_ledger_moves_its_version(
    desk: Desk, version: int, steps: tuple[StepRecord, ...]
) -> None:
    train_to(desk, 5)
    assert opened(desk, version=version, steps=steps).refusal is None
    assert desk.accounts.last_step == desk.accounts.load().version == version


@pytest.mark.parametrize(
    ("version", "steps", "missing"),
    [
        (6, (), "6 to 6"),  # a checkpoint whose record nobody says: no benefit of the doubt
        (7, (), "6 to 7"),
        (7, records(7), "6 to 6"),
        (250, records(249, 250), "6 to 248"),
    ],
)
def test_a_gap_between_ledger_and_records_is_found_whatever_the_newest_record_is(
    desk: Desk, version: int, steps: tuple[StepRecord, ...], missing: str
) -> None:
    train_to(desk, 5)
    reason, message = refusal_of(opened(desk, version=version, steps=steps))
    assert reason is Reason.LEDGER_BEHIND
    assert f"lacks the steps of versions {missing}" in message
    assert "restore the coordinator's newest ledger" in message
    assert "--accept-loss" in message
    assert desk.accounts.last_step == desk.accounts.load().version == 5


@pytest.mark.parametrize("steps", [records(6, 8), records(6, 7), records(7, 6, 8), records(6, 7, 8, 9)])
def test_records_that_are_not_each_version_up_to_the_learners_are_malformed(
    desk: Desk, steps: tuple[StepRecord, ...]
) -> None:
    train_to(desk, 5)
    with refused(Reason.MALFORMED):
        opened(desk, version=8, steps=steps)


def test_the_wait_of_a_trained_group_is_known_where_the_spool_has_it_and_not_anothers(desk: Desk) -> None:
    desk.lease("s1", 2)
    desk.submit("0.1")
    judged = GroupVerdict("0.1", Verdict.SUSPECT)
    desk.settle(judged_groups.judgement(desk.accounts, judged, now=desk.now))
    assert desk.lease("s2") == ["0.2"]
    desk.submit("0.2", "s2")
    desk.submit("1.1")
    trained = desk.train(1, "0.1", "1.1").trained
    assert [(group.group_id, group.spooled_at_s) for group in trained] == [("0.1", None), ("1.1", NOW_S)]


def test_all_repeated_records_are_taken_together_or_none(desk: Desk) -> None:
    desk.lease("s1", 2)
    desk.submit("0.1")
    desk.submit("1.1")
    good, bad = StepRecord(1, ("0.1",), (0,)), StepRecord(2, ("7.1",), (0,))
    assert opened(desk, version=2, steps=[good, bad]).unknown == ("7.1",)
    assert desk.accounts.last_step == 0
    outcome = opened(desk, version=2, steps=[good, replace(bad, group_ids=("1.1",))])
    assert [trained.group_id for trained in outcome.trained] == ["0.1", "1.1"]
    assert desk.accounts.last_step == 2


@pytest.mark.parametrize("name", ["1.1", "9.1", "x"])
def test_a_group_that_was_never_submitted_here_proves_an_older_ledger(desk: Desk, name: str) -> None:
    desk.lease("s1", 2)
    desk.submit("0.1")
    for outcome in (
        desk.train(1, "0.1", name),
        opened(desk, version=1, steps=[StepRecord(1, (name,), (0,))]),
        opened(desk, version=0, held=["0.1", name]),
    ):
        assert outcome.unknown == (name,)
        assert refusal_of(outcome)[0] is Reason.LEDGER_BEHIND
    assert desk.accounts.last_step == 0
    assert desk.accounts.slots.open_slots[0].state is SlotState.SPOOLED


def test_a_ledger_read_back_leases_nothing_before_the_learner_finds_nothing_missing(desk: Desk) -> None:
    record = StepRecord(1, ("0.1",), (0,))
    balance = Balance(
        SlotBalance(settled={SlotState.TRAINED: 1}, next_slot=1),
        facts=(replace(LEARNER, version=1),),
        last_step=record,
    )
    desk = Desk(make_accounts(balance))
    assert (lease(desk).waits_for, lease(desk).retry_after_s) == ("learner", leasing.LEARNER_PAUSE_S)
    desk.accounts.confirm()
    assert [one.lease_id for one in lease(desk).leases] == ["1.1"]
    desk.accounts.doubt("versions 2 to 9")
    assert lease(desk).waits_for == "ledger"


FIRST_SLOT = 1000


def restored() -> Desk:
    """Return a desk over a backup of version 5, slots 0 to 6, 5 and 6 open; a loss was accepted."""
    lost = tuple(
        Slot(number, number, SlotState.LOST, (Attempt(1, "s1", is_submitted=True),), granted=1)
        for number in (5, 6)
    )
    slots = SlotBalance(
        settled={SlotState.TRAINED: 5, SlotState.LOST: len(lost)},
        lost=tuple(slot.number for slot in lost),
        next_slot=FIRST_SLOT,
    )
    facts = (Generation(1, FIRST_SLOT, 7, NOW_S), replace(LEARNER, version=5))
    balance = Balance(slots, facts=facts, last_step=StepRecord(5, ("4.1",), (0,)), accepts_loss=True)
    return Desk(make_accounts(balance))


def test_an_accepted_loss_is_closed_by_the_learner_once_and_counts_for_the_staleness_bound() -> None:
    desk = restored()
    assert lease(desk).waits_for == "learner"
    outcome = opened(desk, version=20, steps=[StepRecord(20, ("5.2", "77.1"), (0, 0))])
    assert (outcome.refusal, outcome.accepted_loss, outcome.lost) == (None, range(6, 20), ("5.2", "77.1"))
    assert desk.accounts.open_loss is None
    desk.accounts.confirm()
    load = desk.accounts.load()
    # 14 steps of 2 groups each are not among the trained; two lost groups were named and are.
    assert (load.version, load.batchless_steps, load.trained_groups) == (20, 14, 7)
    assert desk.lease(held=20) == [f"{FIRST_SLOT}.1"]
    reason, message = refusal_of(opened(desk, version=30, steps=records(30)))
    assert (reason, "21 to 29" in message) == (Reason.LEDGER_BEHIND, True)


def test_a_rollback_is_recorded_with_its_version_and_makes_no_room_for_staler_groups() -> None:
    desk = Desk()
    join(desk)
    opened(desk, version=0)
    desk.accounts.confirm()
    train_to(desk, 2)
    before = desk.accounts.load()
    rollback = StepRecord(3, (), (), restored_version=1)
    assert desk.settle(step_history.step(desk.accounts, rollback, now=desk.now)).recorded == (rollback,)
    load = desk.accounts.load()
    assert (load.version, load.batchless_steps - before.batchless_steps) == (3, 1)
    assert (
        capacities(desk.accounts.terms.bounds, load)["staleness"]
        == (capacities(desk.accounts.terms.bounds, before)["staleness"])
    )
    assert opened(desk, version=3, steps=[rollback]).refusal is None


def test_a_loss_that_nobody_accepted_is_not_open() -> None:
    balance = Balance(SlotBalance(next_slot=10), facts=(LEARNER, Generation(1, 10, 0, NOW_S)))
    desk = Desk(make_accounts(balance))
    assert desk.accounts.open_loss is None
    assert refusal_of(opened(desk, version=7))[0] is Reason.LEDGER_BEHIND


def test_a_lost_group_is_passed_over_once_and_doubled_the_second_time() -> None:
    desk = restored()
    opened(desk, version=9)
    assert desk.train(10, "6.3", "900.1").lost == ("6.3", "900.1")
    assert desk.train(11, "6.1").doubled == ("6.1",)
    assert desk.train(11, "900.2").doubled == ("900.2",)
    assert desk.train(11, "3.1").doubled == ("3.1",)
    assert desk.train(11, f"{FIRST_SLOT}.1").unknown == (f"{FIRST_SLOT}.1",)
    assert desk.accounts.slots.counts()[SlotState.LOST] == 1
    assert desk.accounts.load().trained_groups == 7


@pytest.mark.parametrize("name", ["5.1", "6.2", "7.1", "999.1"])
def test_work_leased_in_the_time_that_was_lost_is_told_to_be_in_vain(name: str) -> None:
    desk = restored()
    assert desk.accounts.slots.renew("s1", name, now=desk.now)
    submitted = desk.submit(name)
    assert (submitted.verdict, "lost" in submitted.detail) == (Verdict.FOREIGN, True)


def test_held_groups_of_the_time_that_was_lost_do_not_keep_the_learner_out() -> None:
    desk = restored()
    assert opened(desk, version=20, held=["5.2", "44.1"]).refusal is None


def test_a_learner_that_knows_no_more_than_the_restored_ledger_has_lost_nothing() -> None:
    desk = restored()
    outcome = opened(desk, version=5, steps=[StepRecord(5, ("4.1",), (0,))])
    assert (outcome.refusal, len(outcome.accepted_loss), desk.accounts.open_loss) == (None, 0, None)
    assert desk.accounts.load().batchless_steps == 0


def test_a_learner_may_be_the_first_of_a_ledger_from_before_it_came_where_the_loss_was_accepted() -> None:
    balance = Balance(SlotBalance(next_slot=10), facts=(Generation(1, 10, 0, NOW_S),), accepts_loss=True)
    desk = Desk(make_accounts(balance))
    join(desk, version=7)
    assert opened(desk, version=7).accepted_loss == range(1, 8)


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ((), ()),
        (((0, 1),), ()),
        (((0, 0),), ()),  # it may know of fewer
        (((0, 2),), ("1", "2 (leased)")),
        (((0, 1), (3, 3)), ("1", "3 (spooled)")),
        (((0, 900),), ("3", "2 (leased)", "3 (spooled)", "900 (never leased)")),
    ],
)
def test_a_learner_that_counts_a_slot_as_trained_on_which_the_ledger_does_not_is_refused(
    desk: Desk, slots: tuple[tuple[int, int], ...], named: tuple[str, ...]
) -> None:
    """As of a checkpoint in which a bit flipped: it would refuse every group of these slots."""
    desk.trust("s1")
    names = desk.lease(wanted=4)
    for name in (names[0], names[1], names[3]):
        assert desk.submit(name).verdict is Verdict.SPOOLED
    desk.train(1, names[0])
    unacknowledged = StepRecord(2, (names[1],), (0,))
    hello = Hello("learner", 1, 2, (unacknowledged,), trained_slots=slots)
    if not named:
        assert desk.settle(step_history.drain_opens(desk.accounts, hello, now=desk.now)).refusal is None
        return
    with refused(Reason.ROLLBACK, *named):
        step_history.drain_opens(desk.accounts, hello, now=desk.now)
