"""The evaluations of a run: one version after another is asked the held-out prompts; pure.

    planned --a sampler that holds it asks for leases--> under way --answered, or nobody left--> finished
                                          '---- its prompts or its sampling are configured otherwise ----^

Version 0 is planned at the start of a run; from then on, the next multiple of ``every_versions``, or the
head where that is beyond it. Samplers are told the number ahead, stop at the first version from there on,
and stay until their held-out prompts are generated (``sampler.served_policy``). The first to ask for
leases there settles which version it is. One evaluation is under way at a time.

Each prompt has a slot, or two where no verifier is there: two samplers then answer it. They are slots like
any of training, in the one table; ``prompts`` places apart they are of the same prompt. An answer counts once
its group is not held back for a check any more, and only if every token was drawn by the version itself.

What is durable: an evaluation as it begins and as it ends, and its slots with what won them. A score is told
once, when its evaluation ends. It changes only where a sampler whose answers are in it is revoked or proved
to lie: then they go, and it is worked out again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.work.evaluation.held_out_score import progress, scored
from node.coordinator.work.slots.slot import (
    SETTLED,
    Slot,
    SlotKind,
    SlotState,
    group_id,
    held_out_number,
    reopened,
    version_and_place,
)
from node.coordinator.work.slots.slot_table import SlotTable
from node.coordinator.work.terms.run_terms import EvaluationSettings, Work
from node.values.evaluation import Evaluation, EvaluationStatus, evaluation_status
from node.values.groups.failure import Failure

LEASES_PER_HELD_OUT_LEASE: Final = 2
"""At most one in so many of a sampler's leases is on a held-out prompt, or one if it has fewer: training goes
on while a sampler stays at a version, and the stay is short."""

ANSWERS_KEPT: Final = 1 << 16
"""Held-out slots in memory, 40 MB. Beyond that those of the oldest evaluations go: what a sampler said there
is then out of a revocation's reach."""

FINAL_FAULTS: Final = frozenset(
    {Failure.PROMPT_TOO_LONG, Failure.PROMPT_TIMED_OUT, Failure.GRADING_TIMED_OUT}
)
"""Faults after which a sampler is not asked the prompt again in this evaluation: it would fail likewise, and
what timed out has cost all the time it may. Other samplers are asked instead."""


@dataclass(frozen=True, slots=True)
class EvaluationChange:
    slots: tuple[Slot, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    """As they begin, end, or are without some answers."""


NO_CHANGE: Final = EvaluationChange()


class Evaluations:
    """The held-out slots of a run's slot table, and what their answers come to."""

    def __init__(
        self,
        settings: EvaluationSettings,
        evaluations: Iterable[Evaluation],
        slots: Iterable[Slot],
        table: SlotTable,
        *,
        lease_ttl_s: float,
        now: float,
    ) -> None:
        """Restore; samplers get a full term from ``now`` to ask for more leases.

        Args:
            evaluations: Of the run, all of them.
            slots: Held-out ones of the newest evaluations, open and settled.
            table: The run's, with those of training too.
        """
        self.settings = settings
        self.under_way: Evaluation | None = None
        self.finished: dict[int, Evaluation] = {}
        self._table = table
        self._lease_ttl_s = lease_ttl_s
        self.slots: dict[int, dict[int, Slot]] = {}
        """Version -> its held-out slots by number, open and settled."""
        self._askers: dict[str, tuple[float, int]] = {}
        """Sampler -> when it last asked for leases, and the version that it held. In memory only."""
        self._planned: int | None = None
        self._last_change_s = self._waits_until_s = now
        for evaluation in evaluations:
            self.apply(evaluation)
        self.apply_slots(slots, now=now)
        self._last_change_s = now
        if self.under_way is not None:
            self._waits_until_s = now + lease_ttl_s

    @property
    def is_configured(self) -> bool:
        return self.settings.every_versions > 0

    @property
    def status(self) -> EvaluationStatus:
        current = self.under_way
        if current is not None:
            current = progress(current, self.slots.get(current.version, {}).values())
        return evaluation_status(self.finished.values(), current, by=self.settings.best_by)

    def from_version(self, held_version: int) -> int | None:
        """Return from which version on a sampler is to stop: the one under evaluation, or the next where it
        has come to that. One that it has passed is overdue, and begins at any version. None: nowhere."""
        if not self.is_configured:
            return None
        if self.under_way is not None and held_version < self.under_way.version:
            return self.under_way.version
        return self._next_version(0) if self._planned is None else self._planned

    def awaited_version(self, head: int) -> int | None:
        """Return the version under evaluation or due; None: neither."""
        if self.under_way is not None:
            return self.under_way.version
        planned = self._next_version(head) if self._planned is None else self._planned
        return planned if self.is_configured and planned <= head else None

    def plan(self, head: int) -> None:
        """Decide from which version on the next evaluation may begin, given the newest announced one."""
        if self.is_configured and self.under_way is None and self._planned is None:
            self._planned = self._next_version(head)

    def is_due(self, held_version: int) -> bool:
        """Whether an evaluation begins with a sampler that holds this version."""
        return self.under_way is None and self._planned is not None and held_version >= self._planned

    def work(self, work: Work) -> Work:
        """Return what a lease of a held-out prompt asks for, where one for training asks for ``work``."""
        return replace(work, group_size=self.settings.completions, sampling=self.settings.sampling)

    def begun(self, version: int, *, first_prompt: int, is_checked: bool, now: float) -> EvaluationChange:
        """Begin the evaluation of a version that is due; ``is_checked``: a verifier checks the answers."""
        if not self.is_due(version):
            return NO_CHANGE
        prompts = self.settings.prompts
        slots = tuple(
            Slot(
                held_out_number(version, place),
                first_prompt + place % prompts,
                SlotState.AVAILABLE,
                attempts=(),
                granted=0,
            )
            for place in range(prompts if is_checked else 2 * prompts)
        )
        return EvaluationChange(slots, (self.settings.begun(version, first_prompt=first_prompt, now=now),))

    def grant(
        self, holder: str, wanted: int, *, held_version: int, running: int, now: float
    ) -> tuple[Slot, ...]:
        """Lease held-out prompts to a sampler, up to their part of its leases; remember that it asked."""
        self._askers[holder] = (now, held_version)
        current = self.under_way
        if current is None or held_version != current.version or self._is_outdated(current.first_prompt):
            return ()
        share = max(1, (running + wanted) // LEASES_PER_HELD_OUT_LEASE)
        share -= self._table.open.running(holder, SlotKind.HELD_OUT)
        taken = self._taken_prompts(holder)

        def may_have(slot: Slot) -> bool:
            is_free = slot.prompt_index not in taken
            taken.add(slot.prompt_index)
            return is_free

        return self._table.grant_held_out(holder, min(wanted, share), now=now, may_have=may_have)

    def has_left(self, holder: str, *, held_version: int, stays: bool) -> bool:
        """Whether prompts of the version that a sampler holds are left for it, now or once it stays."""
        if self.under_way is None:
            return not stays and self.is_due(held_version)
        return held_version == self.under_way.version and self._may_ask(holder)

    def has_answered(self, holder: str, number: int) -> bool:
        """Whether a sampler has answered the prompt of a slot: its expired lease of another may win late."""
        version, _ = version_and_place(number)
        own = self.slots[version][number].prompt_index
        return any(
            slot.prompt_index == own and slot.winning_holder == holder
            for slot in self.slots[version].values()
        )

    def turn(self, *, first_prompt: int, is_held: Callable[[int], bool], now: float) -> EvaluationChange:
        """Count the answers that no check holds back, and end an evaluation that is over."""
        counted = tuple(
            replace(slot, state=SlotState.EVALUATED)
            for slot in self._table.open.answered_slots()
            if not is_held(slot.number)
        )
        current = self.under_way
        if current is None:
            return EvaluationChange(counted)
        slots = self.slots[current.version] | {slot.number: slot for slot in counted}
        unsettled = [slot for slot in slots.values() if slot.state not in SETTLED]
        if unsettled and not self._is_outdated(first_prompt) and self._may_go_on(unsettled, now):
            return EvaluationChange(counted)
        given_up = tuple(map(_given_up, unsettled))
        slots |= {slot.number: slot for slot in given_up}
        return EvaluationChange((*counted, *given_up), (scored(current, slots.values(), finished_at_s=now),))

    def without(self, node_ids: Collection[str], *, group_ids: Collection[str] = ()) -> EvaluationChange:
        """Take back the answers of these samplers, or single ones.

        Their prompts are asked again while the evaluation is under way; a score is worked out again.
        """
        changed: list[Slot] = []
        recomputed: list[Evaluation] = []
        for version, slots in self.slots.items():
            is_over = version in self.finished
            again = [
                _taken_back(slot, is_over=is_over)
                for slot in slots.values()
                if slot.answer is not None
                and (slot.winning_holder in node_ids or group_id(slot.number, slot.winner) in group_ids)
            ]
            changed += again
            if again and is_over:
                left = slots | {slot.number: slot for slot in again}
                before = self.finished[version]
                recomputed.append(scored(before, left.values(), finished_at_s=before.finished_at_s))
        return EvaluationChange(tuple(changed), tuple(recomputed))

    def apply(self, evaluation: Evaluation) -> None:
        """Make an evaluation that begins, ends or is without some answers the truth."""
        if evaluation.finished_at_s:
            self.finished[evaluation.version] = evaluation
            if self.under_way is not None and self.under_way.version == evaluation.version:
                self.under_way = None
        else:
            self.under_way, self._planned = evaluation, None
            self._last_change_s = evaluation.started_at_s
            self._askers = {name: self._askers[name] for name in self._active(evaluation.started_at_s)}

    def apply_slots(self, slots: Iterable[Slot], *, now: float) -> None:
        """Make decided slots the truth; those of training are passed over."""
        for slot in slots:
            if slot.kind is SlotKind.HELD_OUT:
                version, _ = version_and_place(slot.number)
                self.slots.setdefault(version, {})[slot.number] = slot
                self._last_change_s = now
        surplus = sum(map(len, self.slots.values())) - ANSWERS_KEPT
        if surplus <= 0:
            return
        for version in sorted(self.slots.keys() & self.finished.keys()):
            if surplus > 0:
                surplus -= len(self.slots.pop(version))

    def bound_times(self, now: float) -> None:
        """Put no time further ahead than it can be: the clock was set back."""
        self._askers = {name: (min(at_s, now), held) for name, (at_s, held) in self._askers.items()}
        self._last_change_s = min(self._last_change_s, now)
        self._waits_until_s = min(self._waits_until_s, now + self._lease_ttl_s)

    def _is_outdated(self, first_prompt: int) -> bool:
        """Whether the one under way has other terms than are configured."""
        assert self.under_way is not None
        return self.under_way.terms != self.settings.terms(first_prompt)

    def _may_go_on(self, unsettled: Collection[Slot], now: float) -> bool:
        """Whether an answer is still to come. A sampler that does not come is waited for once."""
        assert self.under_way is not None
        if any(slot.state is not SlotState.AVAILABLE for slot in unsettled) or now < self._waits_until_s:
            return True
        if now - self._last_change_s >= self._lease_ttl_s:
            return False
        coming = (name for name in self._active(now) if self._askers[name][1] <= self.under_way.version)
        return not self._askers or any(map(self._may_ask, coming))

    def _active(self, now: float) -> Iterator[str]:
        """Yield the samplers that have asked for leases within a term."""
        return (name for name, (at_s, _) in self._askers.items() if now - at_s <= self._lease_ttl_s)

    def _may_ask(self, holder: str) -> bool:
        taken = self._taken_prompts(holder)
        available = map(self._table.open_slots.__getitem__, self._table.open.held_out)
        return any(slot.prompt_index not in taken for slot in available)

    def _taken_prompts(self, holder: str) -> set[int]:
        """Return the prompts under evaluation that a sampler answers, has answered or cannot answer."""
        assert self.under_way is not None
        return {
            slot.prompt_index
            for slot in self.slots[self.under_way.version].values()
            for attempt in slot.attempts
            if attempt.holder == holder
            and (attempt.number == slot.winner or attempt is slot.lease or attempt.failure in FINAL_FAULTS)
        }

    def _next_version(self, head: int) -> int:
        every = max(1, self.settings.every_versions)
        known = [*self.finished, *([] if self.under_way is None else [self.under_way.version])]
        return max([head, *(version // every * every + every for version in known)])


def _given_up(slot: Slot) -> Slot:
    state = SlotState.ABANDONED if slot.attempts else SlotState.SKIPPED
    return replace(slot, state=state, winner=0, answer=None)


def _taken_back(slot: Slot, *, is_over: bool) -> Slot:
    failed = slot.with_failure(slot.winner, Failure.REFUSED)
    return _given_up(failed) if is_over else reopened(failed)
