"""Everything the coordinator counts, and how a transaction changes it; pure.

The ledger stores transactions. The accounts are their sum, so that a restart reads back what memory held.

    slots, group --> slot table, spool        steps, versions --> the newest record, the version log
    facts --by kind--> the reducer that ``Accounts`` names for it

Something durable that a feature has to say is a ``Fact`` in its own module, with its class in
``balance.FACTS``. ``single_facts`` has it; where there are many, a reducer that ``Accounts.go_back`` names.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.capacity import Bounds, Load
from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.checks.reward_checks import RewardChecks
from node.coordinator.work.delivery import NewcomersPart, SpooledGroups
from node.coordinator.work.evaluation.evaluations import Evaluations
from node.coordinator.work.orders.orders import Orders
from node.coordinator.work.samplers.sampler_standing import Standing, checked_share
from node.coordinator.work.samplers.standings import Standings
from node.coordinator.work.samplers.tallies import Tallies, Tally
from node.coordinator.work.single_facts import SingleFacts
from node.coordinator.work.slots.bad_prompts import BadPrompts
from node.coordinator.work.slots.slot import (
    CONSUMED,
    UNTRAINED,
    Slot,
    SlotKind,
    SlotState,
    group_id,
    is_held_out,
    kind_of,
    slot_and_attempt,
)
from node.coordinator.work.slots.slot_generations import Generation, Generations
from node.coordinator.work.slots.slot_table import SlotTable
from node.coordinator.work.terms.group_check import NotedOptions
from node.coordinator.work.terms.model_check import Learner
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.coordinator.work.terms.run_terms import RunGrader, RunTerms
from node.coordinator.work.version_log import VersionLog
from node.values.evaluation import Evaluation
from node.values.groups.failure import BadPrompt
from node.values.operator_order import Order


class Accounts:
    """The sum of all transactions of a run."""

    def __init__(self, balance: Balance, terms: RunTerms, *, now: float) -> None:
        """Begin with what the ledger holds."""
        self.terms = terms
        bounds = terms.bounds
        self.reward_checks = RewardChecks(
            terms.check_secret,
            most_held=bounds.unchecked_groups,
            most_owed_bytes=bounds.buffer_bytes // 4,
            is_required=terms.require_verifier,
            grades=terms.work.verifiers_grade,
        )
        self.work = terms.work
        """The terms of every lease of the run."""
        self._latest_s = now
        """The latest time this was told."""
        self.leased_before_change: frozenset[str] = frozenset()
        """Leases that were out when the task's options changed. In memory only, as after a later restart few
        of their groups still come."""
        self.is_usable: Callable[[int], bool] = lambda prompt_index: True
        """Whether a prompt can be asked, as far as the coordinator can tell from its row."""
        self.version_groups = 0
        """Groups that a version consumes, as a learner that merges says; in memory only. 0: a batch."""
        self.is_on_offer: Callable[[int], bool] = lambda version: False
        """Whether the store offers a version, which may be newer than the log."""
        self.go_back(balance, now=now)

    def go_back(self, balance: Balance, *, now: float) -> None:
        """Become what the ledger holds and no more, as after a restart.

        Leases get a full term, and the learner has to confirm again. The run's grader stays.
        """
        terms = self.terms
        self.tallies = Tallies(balance.of(Tally))
        self.standings = Standings.restored(balance.of(Standing), self.tallies.delivered())
        self.bad_prompts = BadPrompts(balance.of(BadPrompt), retry_s=terms.prompt_retry_s)
        self.orders = Orders(balance.of(Order))
        self._generations = Generations(balance.of(Generation))
        self.slots = SlotTable(
            balance.slots,
            generations=balance.of(Generation),
            data=balance.data,
            prompts=terms.training_prompts,
            seed=terms.prompt_seed,
            lease_ttl_s=terms.lease_ttl_s,
            now=now,
        )
        self.evaluations = Evaluations(
            terms.evaluation,
            balance.of(Evaluation),
            balance.held_out,
            self.slots,
            lease_ttl_s=terms.lease_ttl_s,
            now=now,
        )
        self._reducers: Mapping[str, Callable[[Any], None]] = {
            Tally.kind: self.tallies.apply,
            Standing.kind: self.standings.apply,
            BadPrompt.kind: self.bad_prompts.apply,
            Order.kind: self.orders.apply,
            Generation.kind: self._generations.apply,
            Evaluation.kind: self.evaluations.apply,
            NotedOptions.kind: self._note_changed_options,
        }
        self.single_facts = SingleFacts(fact for fact in balance.facts if fact.kind not in self._reducers)
        self._accepts_loss = balance.accepts_loss
        self.versions = VersionLog(balance.announced)
        self.newest_record = balance.last_step
        self.is_confirmed = self.slots.next_slot == 0 and balance.last_step is None
        """Whether the learner has said, since this process began, that the ledger lacks nothing. One
        that never leased anything has nothing to lack. Until then no slot is leased."""
        self.gap = ""
        self.spooled = SpooledGroups(balance.spooled_at_s, balance.spooled_bytes)
        for sampler_id in self.tallies.delivered():
            self.slots.open.prove(sampler_id)
        self.reward_checks.restore(balance.owed_checks)
        if any(standing.checks for standing in self.standings):
            self.reward_checks.has_had_verifier = True
        for slot in (*self.slots.open.untrained_slots(), *self.slots.open.answered_slots()):
            if not terms.work.verifiers_grade or slot.state is SlotState.UNGRADED:
                self._draw(slot, now=now)

    @property
    def bounds(self) -> Bounds:
        """Bounds on what is under way."""
        bounds = self.terms.bounds
        return replace(bounds, batch_groups=max(bounds.batch_groups, self.version_groups))

    @property
    def learner(self) -> Learner | None:
        """The learner that may publish; None: none has ever joined."""
        return self.single_facts.of(Learner)

    @property
    def data(self) -> DataSeen:
        """The rows that the prompts are made from; ``NO_DATA``: samplers have their own."""
        return self.single_facts.of(DataSeen) or NO_DATA

    @property
    def grader(self) -> RunGrader:
        """The code that the run's groups are graded by, as ``Peers`` finds it."""
        return self.work.grader

    @grader.setter
    def grader(self, grader: RunGrader) -> None:
        self.work = replace(self.work, grader=grader)

    @property
    def first_held_out(self) -> int:
        """Number of the first held-out prompt."""
        return self.data.held_out_at if self.data.rows else self.terms.training_prompts

    @property
    def last_step(self) -> int:
        recorded = 0 if self.newest_record is None else self.newest_record.version
        return max([recorded, *(versions[-1] for versions in self._generations.lost_versions)])

    @property
    def open_loss(self) -> Generation | None:
        """The newest generation, where what was lost before it is accepted and not known yet."""
        newest = self._generations.newest
        is_open = newest is not None and newest.lost_versions is None and self._accepts_loss
        return newest if is_open else None

    def confirm(self) -> None:
        """Note that the learner finds nothing missing in the ledger."""
        self.is_confirmed, self.gap = True, ""

    def doubt(self, gap: str) -> None:
        """Note that the learner has done what the ledger does not know of."""
        self.is_confirmed, self.gap = False, gap

    def apply(self, transaction: Transaction, *, now: float) -> None:
        """Add a transaction, which is on disk or about to be; see ``RunLedger``."""
        if (stored := transaction.stored) is not None:
            number, _ = slot_and_attempt(stored.group_id)
        if stored is not None and kind_of(number) is SlotKind.TRAIN:
            won = (slot for slot in transaction.slots if slot.number == number)
            took_s = next((self.slots.took_s(slot, now=now) for slot in won), None)
            self.standings.note_delivery(stored.sampler_id, took_s)
            self.slots.open.prove(stored.sampler_id)
        self.slots.apply(transaction.slots, now=now)
        for fact in transaction.facts:
            self._reducers.get(fact.kind, self.single_facts.apply)(fact)
        self.evaluations.apply_slots(transaction.slots, now=now)
        for slot in transaction.slots:
            if slot.state not in UNTRAINED:
                self.spooled.drop(slot.number)
                self.reward_checks.drop(slot.number, is_consumed=slot.state in CONSUMED)
        for group in filter(None, (stored, transaction.graded)):
            self.spooled.put(group)
        self._note_checks(transaction, now=now)
        if transaction.steps:
            self.newest_record = transaction.steps[-1]
        self.versions.add(transaction.announced)

    def note_time(self, now: float) -> float:
        """Note the time; return how far the clock was set back since, seconds.

        Deadlines, in memory only, are then moved to where they may be at the latest.
        """
        set_back_s, self._latest_s = max(0.0, self._latest_s - now), now
        if set_back_s:
            self.slots.bound_times(now)
            self.evaluations.bound_times(now)
            self.reward_checks.bound_times(now)
        return set_back_s

    def renew(self, sampler_id: str, lease_ids: Collection[str], *, now: float) -> tuple[str, ...]:
        """Extend leases to a full term, none beyond its maximal age; return those whose work is in vain.

        A sampler that is quarantined or struck out holds up no evaluation: its leases there end with their
        term.
        """
        max_age_s = self.max_age_s(sampler_id)
        standing = self.standings.of(sampler_id)
        is_believed = not (standing.quarantine or standing.is_struck_out)

        def is_in_vain(lease_id: str) -> bool:
            age_s = 0.0 if is_held_out(lease_id) and not is_believed else max_age_s
            return self.slots.renew(sampler_id, lease_id, now=now, max_age_s=age_s)

        return tuple(filter(is_in_vain, lease_ids))

    def max_age_s(self, sampler_id: str) -> float:
        """Return the age at which a lease of the sampler ends whatever its heartbeats say."""
        if self.gap:  # nothing is taken in meanwhile
            return self.terms.lease_max_s
        return self.standings.max_age_s(
            sampler_id, at_least_s=self.terms.lease_ttl_s, at_most_s=self.terms.lease_max_s
        )

    def has_been_made(self, version: int) -> bool:
        """Whether there is a version; which of them were never published is for the learner to say."""
        newest = 0 if self.learner is None else self.learner.version
        return version <= newest or version in self.versions or self.is_on_offer(version)

    def must_wait_for_checks(self, sampler_id: str, *, now: float) -> bool:
        """Whether a sampler hands in and is leased no more until groups of its own are checked."""
        is_vetted = sampler_id in self.standings.vetted
        return self.reward_checks.must_wait(sampler_id, is_vetted=is_vetted, now=now)

    def held(self, sampler_id: str) -> int:
        """Count the leases of a sampler, those on held-out prompts included."""
        return self.slots.open.running(sampler_id) + self.slots.open.running(sampler_id, SlotKind.HELD_OUT)

    def held_out_bytes(self) -> int:
        """Return the size of the held-out prompts' groups that do not count yet."""
        return self.spooled.size_bytes(*self.slots.open.answered)

    def load(self) -> Load:
        counts = self.slots.counts()
        return Load(
            running_groups=counts[SlotState.LEASED],
            untrained_groups=len(self.slots.open.untrained),
            ungraded_groups=counts[SlotState.UNGRADED],
            untrained_bytes=self.spooled.untrained_bytes,
            version=0 if self.learner is None else self.learner.version,
        )

    def next_undelivered(self) -> Slot | None:
        """Return the oldest slot whose group the learner may be sent, and count it as delivered; or None."""
        is_held, newcomers = self.reward_checks.is_held, self._newcomers_part()
        return self.slots.open.next_undelivered(
            is_held if newcomers is None else newcomers.held_with(is_held)
        )

    def waiting_newcomers(self) -> int:
        """Count the groups that wait because newcomers fill their part of the batches."""
        newcomers = self._newcomers_part()
        return 0 if newcomers is None else newcomers.waiting()

    def ungraded_since_s(self) -> float | None:
        """Return when the group was spooled that has waited longest for a verifier; None: none waits."""
        return min(map(self.spooled.at_s.__getitem__, self.slots.open.ungraded), default=None)

    def _newcomers_part(self) -> NewcomersPart | None:
        """Return the part of newcomers; None where what a sampler says of itself moves nothing."""
        if self.work.verifiers_grade:
            return None
        most = max(1, int(self.terms.newcomers_part * self.terms.bounds.batch_groups))
        return NewcomersPart(self.slots.open, self.standings.vetted, most=most)

    def _note_changed_options(self, _: NotedOptions) -> None:
        self.leased_before_change = frozenset(
            group_id(slot.number, attempt.number)
            for slot in self.slots.open_slots.values()
            for attempt in slot.attempts
            if not attempt.is_submitted
        )

    def _note_checks(self, transaction: Transaction, *, now: float) -> None:
        """Draw what is new; forget what is graded or owed no longer."""
        if (stored := transaction.stored) is not None:
            number, _ = slot_and_attempt(stored.group_id)
            if (slot := self.slots.open_slots.get(number)) is not None:
                self._draw(slot, now=now)
        if (graded := transaction.graded) is not None:
            self.reward_checks.drop(slot_and_attempt(graded.group_id)[0])
        for number in transaction.freed:
            self.reward_checks.drop(number)

    def _draw(self, slot: Slot, *, now: float) -> None:
        standing = self.standings.of(slot.winning_holder)
        is_all = self.work.verifiers_grade or slot.kind is SlotKind.HELD_OUT
        share = 1.0 if is_all else checked_share(standing.checks, standing.differing)
        held = Held.of(slot, size_bytes=self.spooled.size_bytes(slot.number), now=now)
        self.reward_checks.draw(held, share=share)
