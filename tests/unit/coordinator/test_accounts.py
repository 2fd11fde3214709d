"""Counts of the coordinator, and what a restart reads back of them."""

import pytest

from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot import SlotBalance, SlotState
from node.coordinator.work.slots.slot_generations import Generation
from node.values.groups.verdict import Verdict
from node.values.run import StepRecord
from support.coordinator import LEARNER, NOW_S, Desk, make_accounts

STEP = StepRecord(1, ("0.1",), (0,))


@pytest.mark.parametrize(
    ("balance", "is_confirmed"),
    [
        (Balance(), True),
        (Balance(SlotBalance(next_slot=1)), False),
        (Balance(last_step=STEP), False),
        (Balance(SlotBalance(next_slot=1), last_step=STEP), False),
    ],
    ids=["new run", "leased", "trained", "leased and trained"],
)
def test_only_the_ledger_of_a_new_run_needs_no_word_of_the_learner(
    balance: Balance, is_confirmed: bool
) -> None:
    accounts = make_accounts(balance)
    assert accounts.is_confirmed == is_confirmed
    accounts.confirm()
    assert accounts.is_confirmed
    accounts.doubt("version 2")
    assert (accounts.is_confirmed, accounts.gap) == (False, "version 2")
    accounts.confirm()
    assert (accounts.is_confirmed, accounts.gap) == (True, "")


def test_counts_go_on_from_what_the_ledger_holds() -> None:
    accounts = make_accounts(
        Balance(
            facts=(
                Tally("s1", {Verdict.TRAINED: 4, Verdict.ACCEPTED: 3}, staleness_versions=6),
                Tally("s2", {Verdict.ACCEPTED: 1}),
            ),
            last_step=StepRecord(9, (), ()),
        )
    )
    accounts.apply(Transaction(facts=accounts.tallies.after([("s2", Verdict.ACCEPTED)])), now=NOW_S)
    assert accounts.tallies.of("s1").verdicts == {Verdict.TRAINED: 4, Verdict.ACCEPTED: 3}
    assert accounts.tallies.total() == {Verdict.TRAINED: 4, Verdict.ACCEPTED: 5}
    assert [accounts.tallies.staleness_mean(name) for name in ("s1", "s2", "s3")] == [1.5, 0.0, 0.0]
    assert accounts.last_step == 9
    assert accounts.load().version == 0
    assert make_accounts(Balance()).last_step == 0


def test_the_newest_generation_is_the_one_whose_loss_may_be_open() -> None:
    known = Generation(1, 100, 7, NOW_S, lost_versions=range(6, 9))
    open_one = Generation(2, 200, 150, NOW_S)
    balance = Balance(SlotBalance(next_slot=200), facts=(LEARNER, known, open_one), accepts_loss=True)
    accounts = make_accounts(balance)
    assert accounts.open_loss == open_one
    assert (accounts.last_step, accounts.load().batchless_steps) == (8, 3)
    closed = Generation(2, 200, 150, NOW_S, lost_versions=range(20, 25))
    accounts.apply(Transaction(facts=(closed,)), now=NOW_S)
    assert accounts.open_loss is None
    assert (accounts.last_step, accounts.load().batchless_steps) == (24, 8)


def test_prompts_whose_rows_cannot_be_used_are_skipped_and_cost_no_lease() -> None:
    desk = Desk(make_accounts(prompts=10))
    desk.trust("s1")
    desk.accounts.is_usable = lambda prompt_index: prompt_index % 2 == 0
    leases = desk.ask("s1", 5).leases
    assert sorted(lease.prompt_index for lease in leases) == [0, 2, 4, 6, 8]
    assert desk.accounts.slots.counts()[SlotState.SKIPPED] in range(4, 6)
