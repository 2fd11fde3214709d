"""The evaluations of a run: one version after another is asked the held-out prompts; pure.

    planned --a sampler that holds it asks for leases--> under way --answered, or nobody left--> finished
                                          '---- its prompts or its sampling are configured otherwise ----^

Version 0 is planned at the start of a run; from then on, the next multiple of ``every_versions``, or the
head where that is beyond it. Samplers are told the number ahead, stop at the first version from there on,
and stay until their held-out prompts are generated (``sampler.served_policy``). The first to ask for
leases there settles which version it is. One evaluation is under way at a time.

An answer counts only if every token was drawn by the version itself. Each prompt has a slot for each of
``answers`` samplers, and one more where two disagree or one finds a fault (see ``scores``). A single
answer counts only where no other sampler could have been asked; one that let a lease expire had its chance.
When nobody is left that could answer, the rest is dropped.

A slot has attempts and leases like any of training (see ``SlotTable``), in an account of its own. It ends
EVALUATED or ABANDONED. Slots ``prompts`` apart are of the same prompt.
"""

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.work.bad_prompts import Aside
from node.coordinator.work.evaluation.askers import Askers
from node.coordinator.work.evaluation.evaluation_record import Record
from node.coordinator.work.evaluation.evaluation_settings import EvaluationSettings
from node.coordinator.work.evaluation.scores import (
    PromptScore,
    by_prompt,
    is_contested,
    odd_answers,
    prompt_score,
    said_of,
    scored,
)
from node.coordinator.work.group_check import Work
from node.coordinator.work.slot_table import Claim, SlotTable
from node.coordinator.work.slots import SETTLED, Slot, SlotState, group_id, reopened, slot_and_attempt
from node.failure import FAULTS, FailedLease, Failure
from node.rollout import RolloutGroup
from node.run import Evaluation

LEASES_PER_EVALUATION_LEASE: Final = 2
"""At most one in so many of a sampler's leases is for evaluation, or one if it has fewer: training goes on
while a sampler stays at a version, and the stay is short."""

SLOTS_PER_PROMPT: Final = 6
FAULTY_SAMPLERS: Final = 2
"""Samplers that must find a fault with a prompt before nobody else is asked it."""

FINAL_FAULTS: Final = frozenset(
    {Failure.PROMPT_TOO_LONG, Failure.PROMPT_TIMED_OUT, Failure.GRADING_TIMED_OUT}
)
"""Faults after which a sampler is not asked the prompt again in this evaluation: it would fail likewise, and
what timed out has cost all the time it may. Other samplers are asked instead."""

_LEASE_ID: Final = re.compile(r"e(0|[1-9][0-9]{0,15})-(.*)")


@dataclass(frozen=True, slots=True)
class EvaluationChange:
    evaluation: Evaluation | None = None
    """The one under way as it is to become, or as it finishes. None: it stays as it is."""
    slots: tuple[Slot, ...] = ()
    score: PromptScore | None = None
    uncounted: tuple[int, ...] = ()
    """Slots whose answers do not count in the end."""
    odd_samplers: tuple[str, ...] = ()
    removed_samplers: frozenset[str] = frozenset()
    recomputed: tuple[Evaluation, ...] = ()
    """Finished ones without the answers of ``removed_samplers``."""
    forgotten: tuple[int, ...] = ()
    """Versions whose answers are not kept any longer."""
    taken_back: tuple[tuple[int, int], ...] = ()
    """Answers that do not count any longer: (version, slot)."""

    @property
    def leases(self) -> int:
        """Slots among ``slots`` that were leased."""
        return sum(slot.granted > 0 for slot in self.slots)


@dataclass(frozen=True, slots=True)
class EvaluationBalance:
    record: tuple[Evaluation, ...] = ()
    """Oldest version first; the one under way is the last."""
    slots: tuple[Slot, ...] = ()
    """Every slot of the one under way."""
    scores: tuple[tuple[int, PromptScore], ...] = ()
    """(version, answer)."""


def lease_id_of(version: int, slot: Slot) -> str:
    return f"e{version}-{group_id(slot.number, slot.granted)}"


def is_evaluation_lease(lease_id: str) -> bool:
    """Whether it is not the id of a slot of training, which begins with a digit."""
    return lease_id.startswith("e")


class Evaluations:
    def __init__(
        self, settings: EvaluationSettings, balance: EvaluationBalance, *, lease_ttl_s: float, now: float
    ) -> None:
        """Restore; leases get a full term from ``now``, and so do samplers to ask for more."""
        self.settings = settings
        self._lease_ttl_s = lease_ttl_s
        self.record = Record(best_by=settings.best_by)
        self._slots: dict[int, Slot] = {}
        self._scores: dict[int, PromptScore] = {}
        self._clear()
        self._askers = Askers(lease_ttl_s=lease_ttl_s)
        self._planned: int | None = None
        under_way = None
        kept: dict[int, list[PromptScore]] = {}
        for version, score in balance.scores:
            kept.setdefault(version, []).append(score)
        for evaluation in balance.record:
            scores = kept.get(evaluation.version, [])
            if evaluation.finished_at_s:
                self.record.add(evaluation, scores)
            else:
                under_way = evaluation
                self._scores = {score.slot: score for score in scores}
        self._apply_slots(balance.slots, now=now)
        self._last_change_s = now
        self._waits_until_s = now + lease_ttl_s if under_way else 0.0
        self.status = self.record.status(under_way)

    @property
    def is_configured(self) -> bool:
        return self.settings.every_versions > 0

    @property
    def under_way(self) -> Evaluation | None:
        return self.status.under_way

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

    def running(self, holder: str) -> int:
        return self._table.open.running(holder)

    def work(self, work: Work) -> Work:
        """Return what a lease for evaluation asks for, where one for training asks for ``work``."""
        return replace(work, group_size=self.settings.completions, sampling=self.settings.sampling)

    def begun(self, version: int, *, first_prompt: int, now: float) -> EvaluationChange | None:
        """Begin the evaluation of a version that is due; None: it is not."""
        if not self.is_due(version):
            return None
        settings = self.settings
        slots = tuple(
            Slot(n, first_prompt + n % settings.prompts, SlotState.AVAILABLE, attempts=(), granted=0)
            for n in range(settings.prompts * settings.answers)
        )
        return EvaluationChange(settings.begun(version, first_prompt=first_prompt, now=now), slots)

    def ended(self, *, first_prompt: int, now: float) -> EvaluationChange | None:
        """End an evaluation that nobody is left to answer, or whose terms were changed; None: neither."""
        current = self.under_way
        if current is None:
            return None
        is_outdated = current.terms != self.settings.terms(first_prompt)
        if not is_outdated and (any(slot.lease is not None for slot in self._open()) or self._may_go_on(now)):
            return None
        return self._finish(current, self._scores, now=now)

    def grant(
        self, holder: str, wanted: int, *, held_version: int, running: int, now: float
    ) -> EvaluationChange | None:
        """Lease held-out prompts to a sampler, up to their part of its leases; remember that it asked."""
        current = self.under_way
        version = None if current is None else current.version
        self._askers.ask(holder, held_version=held_version, version=version, now=now)
        if current is None or held_version != current.version:
            return None
        if current.terms != self.settings.terms(current.first_prompt):
            return None
        share = max(1, (running + wanted) // LEASES_PER_EVALUATION_LEASE) - self.running(holder)
        own = self._prompts_of(holder)

        def has_prompt(slot: Slot) -> bool:
            return own.setdefault(slot.number % current.prompts, slot.number) != slot.number

        slots = self._table.grant(
            holder,
            min(wanted, share),
            now=now,
            aside=lambda _: Aside.NOT,
            passes_over=has_prompt,
            looks_at=SLOTS_PER_PROMPT * current.prompts,
        )
        return EvaluationChange(current, slots) if slots else None

    def has_left(self, holder: str, *, held_version: int, stays: bool) -> bool:
        """Whether prompts of the version that a sampler holds are left for it, now or once it stays."""
        current = self.under_way
        if current is None:
            return not stays and self.is_due(held_version)
        return held_version == current.version and self._may_ask(holder)

    def claim(self, lease_id: str, holder: str) -> Claim:
        """Return what a submission by ``holder`` would be."""
        version, number, attempt = _parse(lease_id)
        if self.under_way is not None and version == self.under_way.version:
            prompts = self.under_way.prompts
            has_answered = any(
                score.sampler_id == holder and slot % prompts == number % prompts
                for slot, score in self._scores.items()
            )
            claim = self._table.claim(number, attempt, holder)
            # A lease that expired may win late, after its holder was leased the prompt again.
            return Claim.DUPLICATE if has_answered and claim is Claim.WANTED else claim
        newest = self.status.newest
        is_over = newest is not None and 0 <= version <= newest.version
        return Claim.DUPLICATE if is_over else Claim.NEVER_GRANTED

    def slot(self, lease_id: str) -> Slot:
        return self._table.open_slots[_parse(lease_id)[1]]

    def counted(
        self, lease_id: str, holder: str, group: RolloutGroup, *, now: float
    ) -> EvaluationChange | None:
        """Count the group with which ``holder`` answers a WANTED lease."""
        _, number, attempt = _parse(lease_id)
        slot = replace(self._table.submitted(number, attempt), state=SlotState.EVALUATED)
        return self._change((slot,), prompt_score(number, holder, group), now=now)

    def spent(self, lease_id: str, *, now: float) -> EvaluationChange | None:
        """Note that a WANTED lease brought a group that does not count."""
        return self._change((self._table.spent(*_parse(lease_id)[1:]),), now=now)

    def given_back(
        self, holder: str, lease_ids: Iterable[str], failed: Iterable[FailedLease], *, now: float
    ) -> tuple[EvaluationChange | None, tuple[Failure, ...]]:
        """Release leases; return with them the faults of those that failed."""
        slots = {slot.number: slot for slot in self._table.release(holder, self._own(lease_ids))}
        faults = []
        for lease in failed:
            for own in self._own([lease.lease_id]):
                slot = self._table.failed(holder, own, lease.fault)
                if slot is not None and slot.number not in slots:
                    is_over = lease.fault in FINAL_FAULTS
                    slots[slot.number] = replace(slot, state=SlotState.ABANDONED) if is_over else slot
                    faults.append(lease.fault)
        return self._change(tuple(slots.values()), now=now), tuple(faults)

    def renew(self, holder: str, lease_id: str, *, now: float, max_age_s: float) -> bool:
        """Extend a lease to a full term, not beyond its maximal age; return whether its work is in vain."""
        own = self._own([lease_id])
        return not own or self._table.renew(holder, own[0], now=now, max_age_s=max_age_s)

    def bound_times(self, now: float) -> None:
        """Put no time further ahead than it can be; see ``SlotTable.bound_times``."""
        self._table.bound_times(now)
        self._askers.bound_times(now)
        self._last_change_s = min(self._last_change_s, now)
        self._waits_until_s = min(self._waits_until_s, now + self._lease_ttl_s)

    def cut_short(self, holder: str, *, now: float) -> None:
        self._table.cut_short(holder, now=now)

    def expire(self, now: float) -> EvaluationChange | None:
        return self._change(self._table.expire(now), now=now)

    def revoked(self, node_ids: Iterable[str], *, now: float) -> EvaluationChange | None:
        """Take back what these samplers said, here and in the record; None: nothing."""
        gone = frozenset(node_ids)
        recomputed = self.record.without(gone)
        current, slots = self.under_way, {}
        if current is not None:
            for slot in self._open():
                if slot.lease is not None and slot.lease.holder in gone:
                    slots[slot.number] = replace(slot, state=SlotState.AVAILABLE, attempts=slot.attempts[:-1])
            scores = {n: score for n, score in self._scores.items() if score.sampler_id not in gone}
            tried = (slot for slot in self._slots.values() if any(a.holder in gone for a in slot.attempts))
            asked_again = {slot.number % current.prompts for slot in tried}
            slots |= self._further({**self._slots, **slots}, scores, asked_again, without=gone)
            has_changed = slots or len(scores) < len(self._scores)
            current = _progress(current, scores) if has_changed else None
        if not (recomputed or current):
            return None
        return EvaluationChange(current, tuple(slots.values()), removed_samplers=gone, recomputed=recomputed)

    def taken_back(self, lease_id: str, *, now: float) -> EvaluationChange | None:
        """Let an answer count no longer that cannot be graded again; None: it does not count.

        While the evaluation is under way, the prompt is asked again. What is finished is worked out without
        the answer.
        """
        version, number, attempt = _parse(lease_id)
        answer = ((version, number),)
        current = self.under_way
        if current is None or current.version != version:
            recomputed = self.record.without((), answers=answer)
            return EvaluationChange(recomputed=recomputed, taken_back=answer) if recomputed else None
        slot = self._slots.get(number)
        if number not in self._scores or slot is None or slot.winner != attempt:
            return None
        scores = {n: score for n, score in self._scores.items() if n != number}
        again = {number: reopened(slot.with_failure(attempt, Failure.REFUSED))}
        again |= self._further({**self._slots, **again}, scores, [number % current.prompts])
        return EvaluationChange(_progress(current, scores), tuple(again.values()), taken_back=answer)

    def apply(self, change: EvaluationChange, *, now: float) -> None:
        """Make a decided change the truth."""
        if change.removed_samplers:
            self._remove(change.removed_samplers)
        self.record.change(
            change.recomputed,
            without=change.removed_samplers,
            answers=change.taken_back,
            forgotten=change.forgotten,
        )
        if self.under_way is not None:
            for version, number in change.taken_back:
                if version == self.under_way.version:
                    self._scores.pop(number, None)
        evaluation = change.evaluation
        if evaluation is not None:
            self._apply_slots(change.slots, now=now)
            if change.score is not None:
                self._scores[change.score.slot] = change.score
            if self.under_way is None:
                self._askers.begin(evaluation.version, now=now)
            self._planned, self._last_change_s = None, now
            if evaluation.finished_at_s:
                counting = [s for n, s in self._scores.items() if n not in change.uncounted]
                self.record.add(evaluation, counting)
                self._clear()
        under_way = self.under_way if evaluation is None else evaluation
        if under_way is not None and under_way.finished_at_s:
            under_way = None
        if change.recomputed or under_way is None:
            self.status = self.record.status(under_way)
        else:
            self.status = replace(self.status, under_way=under_way)

    def _change(
        self, slots: tuple[Slot, ...], score: PromptScore | None = None, *, now: float
    ) -> EvaluationChange | None:
        current = self.under_way
        if current is None or not slots:
            return None
        scores = self._scores if score is None else {**self._scores, score.slot: score}
        changed = {slot.number: slot for slot in slots}
        after = ChainMap(changed, self._slots)
        further = self._further(after, scores, {slot.number % current.prompts for slot in slots})
        all_slots = (*slots, *further.values())
        is_over = all(slot.state in SETTLED for slot in all_slots)
        if is_over and all(slot.number in changed for slot in self._open()):
            return replace(self._finish(current, scores, now=now), slots=all_slots, score=score)
        return EvaluationChange(_progress(current, scores), all_slots, score)

    def _further(
        self,
        slots: Mapping[int, Slot],
        scores: Mapping[int, PromptScore],
        prompts: Iterable[int],
        *,
        without: frozenset[str] = frozenset(),
    ) -> dict[int, Slot]:
        """Return further slots of those prompts for which not enough samplers are asked."""
        assert self.under_way is not None
        n, first = self.under_way.prompts, self.under_way.first_prompt
        further = {}
        for prompt in prompts:
            numbers = [number for k in range(SLOTS_PER_PROMPT) if (number := prompt + k * n) in slots]
            answers = {
                score.sampler_id: score for number in numbers if (score := scores.get(number)) is not None
            }
            is_open = sum(slots[number].state not in SETTLED for number in numbers)
            wanted = max(self.settings.answers, 3 if self._needs_third(answers) else 0)
            faulty = {
                attempt.holder
                for number in numbers
                for attempt in slots[number].attempts
                if attempt.failure in FAULTS
            } - without
            if len(answers) + is_open >= wanted or len(numbers) == SLOTS_PER_PROMPT:
                continue
            if len(faulty) < FAULTY_SAMPLERS:
                number = prompt + len(numbers) * n
                further[number] = Slot(number, first + prompt, SlotState.AVAILABLE, attempts=(), granted=0)
        return further

    def _needs_third(self, answers: Mapping[str, PromptScore]) -> bool:
        """Whether two samplers took the likeliest tokens of a prompt and say different things."""
        if self.settings.temperature or len(answers) != 2:
            return False
        said = {name: said_of({0: dict(answers)}, name)[0] for name in self.record.measures}
        return any(is_contested(values.values(), widest=0.0) for values in said.values())

    def _finish(
        self, evaluation: Evaluation, scores: Mapping[int, PromptScore], *, now: float
    ) -> EvaluationChange:
        """Return an evaluation as it ends; prompts without enough answers are dropped."""
        attempts = (attempt for slot in self._slots.values() for attempt in slot.attempts)
        died = {attempt.holder for attempt in attempts if attempt.failure is Failure.EXPIRED}
        able = self._askers.able(now) - died
        answers = by_prompt(scores.values(), prompts=evaluation.prompts)
        counting = {
            prompt: of_prompt
            for prompt, of_prompt in answers.items()
            if len(of_prompt) >= min(2, self.settings.answers) or able <= of_prompt.keys()
        }
        left_out, disputed = odd_answers(counting, self.record.measures)
        kept = [
            score
            for of_prompt in counting.values()
            for score in of_prompt.values()
            if score.sampler_id not in left_out
        ]
        counted = len(by_prompt(kept, prompts=evaluation.prompts))
        record = replace(
            scored(evaluation, kept, dropped=evaluation.prompts - counted),
            finished_at_s=now,
            left_out=", ".join(left_out),
            disputed_by=", ".join(disputed),
        )
        return EvaluationChange(
            record,
            uncounted=tuple(sorted(scores.keys() - {score.slot for score in kept})),
            odd_samplers=left_out,
            forgotten=self.record.surplus(len(kept)),
        )

    def _may_go_on(self, now: float) -> bool:
        """Whether an active sampler may still answer. One that does not come is waited for once."""
        if now < self._waits_until_s:
            return True
        if now - self._last_change_s >= self._lease_ttl_s:
            return False
        if not self._askers:
            return True
        version = 0 if self.under_way is None else self.under_way.version
        return any(map(self._may_ask, self._askers.at_or_before(version, now)))

    def _may_ask(self, holder: str) -> bool:
        assert self.under_way is not None
        own = self._prompts_of(holder)
        return any(
            slot.state is SlotState.AVAILABLE
            and own.get(slot.number % self.under_way.prompts, slot.number) == slot.number
            for slot in self._open()
        )

    def _prompts_of(self, holder: str) -> dict[int, int]:
        """Return prompt -> the one slot of it that a sampler may have; -1: it answers, or has answered."""
        assert self.under_way is not None
        prompts: dict[int, int] = {}
        for slot in self._slots.values():
            for attempt in slot.attempts:
                if attempt.holder != holder:
                    continue
                prompt = slot.number % self.under_way.prompts
                if attempt.number == slot.winner or attempt is slot.lease:
                    prompts[prompt] = -1
                elif attempt.failure in FAULTS:
                    prompts.setdefault(prompt, slot.number)
        return prompts

    def _remove(self, gone: frozenset[str]) -> None:
        self._scores = {n: score for n, score in self._scores.items() if score.sampler_id not in gone}
        self._askers.remove(gone)

    def _open(self) -> Iterable[Slot]:
        return self._table.open_slots.values()

    def _apply_slots(self, slots: Iterable[Slot], *, now: float) -> None:
        slots = tuple(slots)
        self._table.apply(slots, now=now)
        self._slots |= {slot.number: slot for slot in slots}

    def _clear(self) -> None:
        """Forget the prompts. Only slots that are put in are leased: none is made."""
        self._table = SlotTable(lease_ttl_s=self._lease_ttl_s, now=0.0)
        self._slots, self._scores = {}, {}

    def _next_version(self, head: int) -> int:
        every, newest = max(1, self.settings.every_versions), self.under_way or self.status.newest
        return max(head, 0 if newest is None else (newest.version // every + 1) * every)

    def _own(self, lease_ids: Iterable[str]) -> list[str]:
        """Return those of the evaluation under way, as its slots' ids."""
        if self.under_way is None:
            return []
        parsed = (_parse(lease_id) for lease_id in lease_ids)
        return [group_id(*rest) for version, *rest in parsed if version == self.under_way.version]


def _progress(evaluation: Evaluation, scores: Mapping[int, PromptScore]) -> Evaluation:
    """Return an evaluation under way with its answers counted; its score is worked out when it finishes."""
    return replace(
        evaluation,
        counted_prompts=len({number % evaluation.prompts for number in scores}),
        answers=len(scores),
        samplers=len({score.sampler_id for score in scores.values()}),
    )


def _parse(lease_id: str) -> tuple[int, int, int]:
    """Return (version, slot, attempt); numbers that do not exist where it is not a lease for evaluation."""
    match = _LEASE_ID.fullmatch(lease_id)
    return (int(match[1]), *slot_and_attempt(match[2])) if match else (-1, -1, 0)
