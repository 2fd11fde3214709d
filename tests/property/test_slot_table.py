"""Whatever samplers, learner, clock and crashes do, the ledger's account of slots stays true."""

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.balance import Transaction
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions import judged_groups, leasing, step_history
from node.coordinator.work.slots import next_slots
from node.coordinator.work.slots.bad_prompts import Aside
from node.coordinator.work.slots.next_slots import SUSPECTS_PER_GRANT
from node.coordinator.work.slots.slot import (
    MAX_ATTEMPTS,
    MAX_FAULTS,
    SETTLED,
    Slot,
    SlotState,
    group_id,
    parse_group_id,
)
from node.coordinator.work.slots.slot_table import SlotTable
from node.values.groups.failure import FAULTS, Failure
from node.values.groups.verdict import GroupVerdict, Verdict
from support.coordinator import LEARNER, LEASE_MAX_S, RETRY_S, TTL_S, Desk, make_accounts
from support.present import present

SAMPLERS = st.sampled_from(["s1", "s2", "s3"])
PROMPTS = 7
"""Few enough that every one comes round again and again."""
BOUNDS = Bounds(
    concurrency_groups=5, buffer_groups=6, batch_groups=2, max_staleness_versions=1, buffer_bytes=1 << 20
)


class SlotsOfARun(RuleBasedStateMachine):
    """Drives decisions against a real ledger file; ``trained`` is the learner's own memory."""

    granted = Bundle("granted")
    """(lease id, sampler) of every lease ever granted; used again and again, as repeats do."""
    spooled = Bundle("spooled")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "ledger.sqlite"
        self.ledger = Ledger.open(self.path, run_id="run")
        self.ledger.record(Transaction(facts=(LEARNER,)))
        self.desk = Desk(make_accounts(prompts=PROMPTS), bounds=BOUNDS)
        self.ids: set[str] = set()
        self.winners: Counter[int] = Counter()
        self.trained: Counter[int] = Counter()
        self.faults: Counter[int] = Counter()
        self.version = 0

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()

    def aside(self, sampler: str, prompt_index: int) -> Aside:
        return self.desk.accounts.bad_prompts.aside(prompt_index, sampler, now=self.desk.now)

    def persist(self) -> None:
        for transaction in self.desk.transactions:
            self.ledger.record(transaction)
        self.desk.transactions.clear()

    @rule(target=granted, sampler=SAMPLERS, wanted=st.integers(1, 6))
    def lease(self, sampler: str, wanted: int) -> object:
        running = self.desk.accounts.slots.open.running(sampler)
        free = leasing.room(self.desk.accounts).groups
        share = leasing.share_of(self.desk.accounts, sampler, free=free, now=self.desk.now)
        passed_over = {n for n in range(PROMPTS) if self.aside(sampler, n) is not Aside.NOT}
        lease_ids = self.desk.lease(sampler, wanted, held=self.version)
        assert not lease_ids or running + len(lease_ids) <= share.leases
        for lease_id in lease_ids:
            number, _ = parse_group_id(lease_id) or (-1, 0)
            assert self.desk.accounts.slots.open_slots[number].prompt_index not in passed_over
        assert self.ids.isdisjoint(lease_ids), "an attempt id was granted twice"
        self.ids.update(lease_ids)
        return multiple(*((lease_id, sampler) for lease_id in lease_ids))

    @rule(target=spooled, lease=granted)
    def submit(self, lease: tuple[str, str]) -> object:
        if self.desk.accounts.load().untrained_groups >= BOUNDS.buffer_groups:
            return multiple()
        submitted = self.desk.submit(*lease)
        if submitted.verdict is not Verdict.SPOOLED:
            assert submitted.verdict in (Verdict.DUPLICATE, Verdict.FOREIGN)
            return multiple()
        return lease[0]

    @rule(lease=granted, thief=SAMPLERS)
    def submit_for_another(self, lease: tuple[str, str], thief: str) -> None:
        slots = dict(self.desk.accounts.slots.open_slots)
        if thief != lease[1]:
            assert self.desk.submit(lease[0], thief).verdict in (Verdict.FOREIGN, Verdict.DUPLICATE)
            assert dict(self.desk.accounts.slots.open_slots) == slots

    @rule(lease=granted)
    def release(self, lease: tuple[str, str]) -> None:
        self.desk.release(lease[1], lease[0])

    @rule(lease=granted, fault=st.sampled_from(sorted(FAULTS)))
    def fail(self, lease: tuple[str, str], fault: Failure) -> None:
        number, _ = parse_group_id(lease[0]) or (-1, 0)
        before = self.desk.accounts.slots.open_slots.get(number)
        if not self.desk.fail(*lease, fault=fault, detail="x" * 300):
            return
        assert before is not None
        self.faults[number] += 1
        assert before.prompt_index in self.desk.accounts.bad_prompts
        if number in self.desk.accounts.slots.open_slots:
            assert self.faults[number] < MAX_FAULTS
        assert self.desk.submit(*lease).verdict in (Verdict.FOREIGN, Verdict.DUPLICATE)

    @rule(seconds=st.floats(0, 4 * RETRY_S))
    def wait(self, seconds: float) -> None:
        """Let time pass in which samplers keep their leases."""
        self.desk.now += seconds
        for slot in self.desk.accounts.slots.open_slots.values():
            if slot.lease is not None:
                lease_id = group_id(slot.number, slot.lease.number)
                self.desk.accounts.renew(slot.lease.holder, [lease_id], now=self.desk.now)

    @rule(lease=granted)
    def renew(self, lease: tuple[str, str]) -> None:
        self.desk.accounts.renew(lease[1], [lease[0]], now=self.desk.now)

    @rule(after_s=st.floats(0, 2 * TTL_S))
    def expire(self, after_s: float) -> None:
        self.desk.expire(after_s)
        oldest = self.desk.accounts.slots.oldest_leases().values()
        assert all(self.desk.now - at_s < LEASE_MAX_S + TTL_S for at_s in oldest)

    @rule(
        group_id=spooled,
        verdict=st.sampled_from([Verdict.ACCEPTED, Verdict.STALE, Verdict.SUSPECT, Verdict.DUPLICATE]),
    )
    def judge(self, group_id: str, verdict: Verdict) -> None:
        self.desk.settle(
            judged_groups.judgement(self.desk.accounts, GroupVerdict(group_id, verdict), now=self.desk.now)
        )

    @rule(group_id=consumes(spooled), is_lost=st.booleans())
    def train(self, group_id: str, is_lost: bool) -> None:
        """A step on one group; where its acknowledgement is lost, the record comes twice."""
        parsed = present(parse_group_id(group_id))
        outcome = self.desk.train(self.version + 1, group_id)
        if outcome.doubled:
            assert parsed[0] not in self.desk.accounts.slots.open_slots
            return
        self.version += 1
        self.trained[parsed[0]] += 1
        if is_lost:
            assert self.desk.train(self.version, group_id) == step_history.Outcome()

    @rule()
    def crash(self) -> None:
        """Kill the coordinator after its last transaction and start it again."""
        self.persist()
        before = self.desk.accounts
        self.ledger.close()
        self.ledger = Ledger.open(self.path, run_id="run")
        after = self.desk.accounts = make_accounts(
            self.ledger.balance(), prompts=PROMPTS, now=self.desk.now, bounds=BOUNDS
        )
        assert dict(after.slots.open_slots) == dict(before.slots.open_slots)
        assert after.slots.counts() == before.slots.counts()
        assert after.load() == before.load()
        assert after.tallies.total() == before.tallies.total()
        assert after.spooled.at_s == before.spooled.at_s
        assert after.bad_prompts.newest(PROMPTS) == before.bad_prompts.newest(PROMPTS)
        assert list(after.standings) == sorted(before.standings, key=lambda standing: standing.sampler_id)
        assert all(
            after.tallies.staleness_mean(s) == before.tallies.staleness_mean(s) for s in ("s1", "s2", "s3")
        )

    @invariant()
    def no_slot_is_trained_on_twice(self) -> None:
        assert all(times == 1 for times in self.trained.values())
        assert self.desk.accounts.slots.counts()[SlotState.TRAINED] == len(self.trained)

    @invariant()
    def counts_add_up(self) -> None:
        slots = self.desk.accounts.slots
        counts = slots.counts()
        open_counts = Counter(slot.state for slot in slots.open_slots.values())
        assert all(open_counts[state] == n for state, n in counts.items() if state not in SETTLED)
        leased = len({parse_group_id(lease_id)[0] for lease_id in self.ids})  # type: ignore[index]
        left = sum(not slot.granted for slot in slots.open_slots.values())
        assert sum(counts.values()) == leased + left + counts[SlotState.SKIPPED]

    @invariant()
    def no_sampler_costs_the_others_more_than_half_of_the_prompts(self) -> None:
        asides = [self.aside("s4", n) for n in range(PROMPTS)]
        assert asides.count(Aside.FOR_ALL) <= PROMPTS // 2
        assert Aside.FOR_IT not in asides

    @invariant()
    def each_look_up_finds_what_a_look_at_every_slot_finds(self) -> None:
        slots, now = self.desk.accounts.slots, self.desk.now
        for sampler in ("s1", "s2", "s3"):
            held = {
                slot.number
                for slot in slots.open_slots.values()
                if slot.lease is not None and slot.lease.holder == sampler
            }
            assert slots.open.held_by(sampler) == held
            assert slots.open.running(sampler) == len(held)
            aside = partial(self.aside, sampler)

            def may_have(number: int, aside: Callable[[int], Aside] = aside) -> bool:
                return aside(slots.open_slots[number].prompt_index) is Aside.NOT

            for wanted in (-1, 0, 1, 4, 9):
                again = next_slots.up_again(slots.open, slots.times, sampler, wanted, may_have, now=now)
                assert list(again) == up_again(slots, sampler, wanted, aside, now=now)
        for at_s in (now, now + TTL_S / 2, now + TTL_S):
            ended = {slot.number for slot in slots.expire(at_s)}
            assert ended == {n for n, deadline_s in slots.times.deadlines.items() if deadline_s <= at_s}

    @invariant()
    def bounds_hold(self) -> None:
        load = self.desk.accounts.load()
        assert load.running_groups <= BOUNDS.concurrency_groups
        assert load.untrained_groups <= BOUNDS.buffer_groups

    @invariant()
    def bad_prompts_take_no_room(self) -> None:
        counts, load = self.desk.accounts.slots.counts(), self.desk.accounts.load()
        no_room = (SlotState.ABANDONED, SlotState.LOST, SlotState.SKIPPED, SlotState.AVAILABLE)
        taken = load.running_groups + load.untrained_groups + counts[SlotState.TRAINED]
        assert taken == sum(counts.values()) - sum(counts[state] for state in no_room)

    @invariant()
    def a_slot_has_a_winner_exactly_while_its_group_is_kept(self) -> None:
        for slot in self.desk.accounts.slots.open_slots.values():
            is_kept = slot.state in (SlotState.SPOOLED, SlotState.ACCEPTED)
            assert (slot.winner > 0) == is_kept == (slot.number in self.desk.accounts.spooled.at_s)
            assert len(slot.attempts) <= MAX_ATTEMPTS

    @invariant()
    def the_spool_holds_just_the_groups_that_are_kept(self) -> None:
        self.persist()
        for slot in self.desk.accounts.slots.open_slots.values():
            stored = self.ledger.group(slot.number)
            assert (stored and stored.group_id) == (
                group_id(slot.number, slot.winner) if slot.winner else None
            )


def up_again(
    slots: SlotTable, holder: str, wanted: int, aside: Callable[[int], Aside], *, now: float
) -> list[Slot]:
    """Return the slots that are leased again, by a look at all of them."""
    suspects = max(1, wanted // SUSPECTS_PER_GRANT)
    found: list[Slot] = []
    for _, slot in sorted(slots.open_slots.items()):
        if len(found) >= wanted:
            break
        if slot.state is not SlotState.AVAILABLE or aside(slot.prompt_index) is not Aside.NOT:
            continue
        if slot.had_fault():
            if not suspects or not slots.times.may_retry(slot, holder, now=now):
                continue
            suspects -= 1
        found.append(slot)
    return found


SlotsOfARun.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestSlotsOfARun = SlotsOfARun.TestCase
