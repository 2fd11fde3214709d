"""The evaluations of a run: one version after another is asked the held-out prompts; pure.

    due --open--> under way --every prompt is counted or dropped--> finished: in the record for ever
                      '---- its prompts or its sampling are configured otherwise ----^

Version 0 is due at the start of a run; from then on, the head once it has reached the next multiple of
``every_versions``. One evaluation is under way at a time, and it is always finished, so that every version is
asked the same prompts. Versions that fell due meanwhile are passed over.

Samplers do not stop for an evaluation: they go on to newer versions while it lasts. The score of version v
is therefore that of v and of the versions that samplers moved on to. A group counts if every token was drawn
by v or a newer version; the record has the oldest and the newest one.

A prompt is a slot with attempts and leases like any of training (see ``Leases``), in an account of its own.
It ends EVALUATED, or ABANDONED, which is to say dropped.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from node.coordinator.work.bad_prompts import Aside
from node.coordinator.work.evaluation.prompt_score import PromptScore, prompt_score, scored
from node.coordinator.work.generations import LostSlots
from node.coordinator.work.group_check import Work
from node.coordinator.work.leases import Claim, Leases
from node.coordinator.work.slots import Slot, SlotState, group_id, slot_and_attempt
from node.failure import FailedLease, Failure
from node.rollout import RolloutGroup, SamplingParameters
from node.run import Evaluation, EvaluationStatus, EvaluationTerms

LEASES_PER_EVALUATION_LEASE: Final = 4
"""At most one in so many of a sampler's leases is for evaluation, or one if it has fewer."""

_LEASE_ID: Final = re.compile(r"e(0|[1-9][0-9]{0,15})-(.*)")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Which versions are evaluated, on what, and how."""

    every_versions: int
    prompts: int
    completions: int
    temperature: float
    """As configured; 0: the most likely token each time."""
    sampling: SamplingParameters
    """As leased."""
    held_out_prompts: int
    """How many of the task's own last prompts are these; 0: they come after its prompts, as rows."""
    task: str = ""
    """Its name."""
    task_options: str = ""
    """Digest of the task's options; empty: it has none."""

    def terms(self, first_prompt: int) -> EvaluationTerms:
        """Return what ``Evaluation.terms`` are under these settings."""
        return self.begun(0, first_prompt=first_prompt, now=0.0).terms

    def begun(self, version: int, *, first_prompt: int, now: float) -> Evaluation:
        """Return the evaluation of a version as it begins."""
        return Evaluation(
            version=version,
            first_prompt=first_prompt,
            prompts=self.prompts,
            completions=self.completions,
            temperature=self.temperature,
            max_new_tokens=self.sampling.max_new_tokens,
            started_at_s=now,
            sampling=self._other_terms,
        )

    @property
    def _other_terms(self) -> str:
        """Return ``Evaluation.sampling``. What cuts the vocabulary never cuts the likeliest token."""
        names = ("stop",) if self.temperature == 0 else ("top_p", "top_k", "min_p", "stop")
        given = {name: getattr(self.sampling, name) for name in names}
        changed = {name: value for name, value in given.items() if value != getattr(_PLAIN, name)}
        changed |= {name: value for name in ("task", "task_options") if (value := getattr(self, name))}
        return json.dumps(changed) if changed else ""


_PLAIN: Final = SamplingParameters(1.0, 1.0, 0, 1)

NO_EVALUATION: Final = EvaluationSettings(0, 0, 0, 0.0, _PLAIN, 0)


@dataclass(frozen=True, slots=True)
class EvaluationChange:
    """An evaluation as it is to become, with what changes of its prompts."""

    evaluation: Evaluation
    slots: tuple[Slot, ...] = ()
    score: PromptScore | None = None


@dataclass(frozen=True, slots=True)
class EvaluationBalance:
    """What the ledger holds of evaluations."""

    record: tuple[Evaluation, ...] = ()
    """Oldest version first; the one under way is the last."""
    slots: tuple[Slot, ...] = ()
    """Every prompt of the one under way."""
    scores: tuple[PromptScore, ...] = ()


def lease_id_of(version: int, slot: Slot) -> str:
    """Return the id of the lease on a prompt of a version's evaluation."""
    return f"e{version}-{group_id(slot.number, slot.granted)}"


def is_evaluation_lease(lease_id: str) -> bool:
    """Whether it is no id of a slot of training, which begins with a digit."""
    return lease_id.startswith("e")


class Evaluations:
    """Those of a run."""

    def __init__(
        self,
        settings: EvaluationSettings,
        balance: EvaluationBalance,
        *,
        lease_ttl_s: float,
        now: float,
    ) -> None:
        """Restore; leases get a full term from ``now``."""
        self._settings = settings
        self._lease_ttl_s = lease_ttl_s
        self._status = EvaluationStatus()
        self._leases = self._without_prompts()
        self._scores: dict[int, PromptScore] = {}
        for evaluation in balance.record:
            self.apply(EvaluationChange(evaluation), now=now)
        self._leases.apply(balance.slots, now=now)
        self._scores |= {score.slot: score for score in balance.scores}

    @property
    def held_out_prompts(self) -> int:
        """How many of the task's last prompts training never uses."""
        return self._settings.held_out_prompts

    @property
    def status(self) -> EvaluationStatus:
        return self._status

    @property
    def under_way(self) -> Evaluation | None:
        return self._status.under_way

    def awaited_version(self, head: int) -> int | None:
        """Return the version under evaluation, or else ``head`` if its evaluation is due; None: neither."""
        if self.under_way is not None:
            return self.under_way.version
        return head if self._is_due(head) else None

    def running(self, holder: str) -> int:
        """Count the leases of a sampler."""
        return self._leases.running(holder)

    def work(self, work: Work) -> Work:
        """Return what a lease for evaluation asks for, where one for training asks for ``work``."""
        return replace(work, group_size=self._settings.completions, sampling=self._settings.sampling)

    def turn(self, *, head: int | None, first_prompt: int, now: float) -> EvaluationChange | None:
        """Begin the evaluation that is due, or end one whose terms were changed; None: neither.

        Args:
            head: The newest announced version, 0 before the first. None: nothing may begin.
            first_prompt: Of those held out.
        """
        settings, current = self._settings, self.under_way
        if current is not None:
            is_outdated = current.terms != settings.terms(first_prompt)
            return EvaluationChange(_ended(current, now=now)) if is_outdated else None
        if head is None or not self._is_due(head):
            return None
        slots = (
            Slot(n, first_prompt + n, SlotState.AVAILABLE, attempts=(), granted=0)
            for n in range(settings.prompts)
        )
        return EvaluationChange(settings.begun(head, first_prompt=first_prompt, now=now), tuple(slots))

    def grant(
        self, holder: str, wanted: int, *, held_version: int, running: int, now: float
    ) -> EvaluationChange | None:
        """Lease held-out prompts to a sampler, up to their share of its leases.

        Args:
            wanted: Leases it asks for.
            held_version: One that is older than the version under way gets none.
            running: Leases that it has, for training and for evaluation.
        """
        current = self.under_way
        if current is None or held_version < current.version:
            return None
        if current.terms != self._settings.terms(current.first_prompt):
            return None
        share = max(1, (running + wanted) // LEASES_PER_EVALUATION_LEASE) - self.running(holder)
        slots = self._leases.grant(holder, min(wanted, share), now=now, aside=lambda _: Aside.NOT)
        return self._change(slots, now=now)

    def claim(self, lease_id: str, holder: str) -> Claim:
        """Return what a submission by ``holder`` would be."""
        version, number, attempt = _parse(lease_id)
        if self.under_way is not None and version == self.under_way.version:
            return self._leases.claim(number, attempt, holder)
        newest = self._status.newest
        is_over = newest is not None and 0 <= version <= newest.version
        return Claim.DUPLICATE if is_over else Claim.NEVER_GRANTED

    def slot(self, lease_id: str) -> Slot:
        """Return the slot of a lease whose claim is WANTED."""
        return self._leases.open_slots[_parse(lease_id)[1]]

    def counted(self, lease_id: str, group: RolloutGroup, *, now: float) -> EvaluationChange | None:
        """Count the group of a WANTED lease."""
        _, number, attempt = _parse(lease_id)
        slot = replace(self._leases.submitted(number, attempt), state=SlotState.EVALUATED)
        return self._change((slot,), prompt_score(number, group), now=now)

    def spent(self, lease_id: str, *, now: float) -> EvaluationChange | None:
        """Note that a WANTED lease brought a group that does not count."""
        return self._change((self._leases.spent(*_parse(lease_id)[1:]),), now=now)

    def given_back(
        self, holder: str, lease_ids: Iterable[str], failed: Iterable[FailedLease], *, now: float
    ) -> tuple[EvaluationChange | None, tuple[Failure, ...]]:
        """Release leases; return with them the faults of those that failed."""
        slots = {slot.number: slot for slot in self._leases.release(holder, self._own(lease_ids))}
        faults = []
        for lease in failed:
            for own in self._own([lease.lease_id]):
                slot = self._leases.failed(holder, own, lease.fault)
                if slot is not None and slot.number not in slots:
                    slots[slot.number] = slot
                    faults.append(lease.fault)
        return self._change(tuple(slots.values()), now=now), tuple(faults)

    def renew(
        self, holder: str, lease_ids: Iterable[str], *, now: float, max_age_s: float
    ) -> tuple[str, ...]:
        """Extend leases to a full term, none beyond its maximal age; return those whose work is in vain."""
        return tuple(
            lease_id
            for lease_id in lease_ids
            if not (own := self._own([lease_id]))
            or self._leases.renew(holder, own, now=now, max_age_s=max_age_s)
        )

    def expire(self, now: float) -> EvaluationChange | None:
        """End every lease whose deadline has passed."""
        return self._change(self._leases.expire(now), now=now)

    def apply(self, change: EvaluationChange, *, now: float) -> None:
        """Make a decided change the truth."""
        evaluation, status = change.evaluation, self._status
        if evaluation.finished_at_s:
            self._leases = self._without_prompts()
            self._scores = {}
            self._status = _recorded(status, evaluation)
            return
        self._leases.apply(change.slots, now=now)
        if change.score is not None:
            self._scores[change.score.slot] = change.score
        self._status = replace(status, under_way=evaluation)

    def _change(
        self, slots: tuple[Slot, ...], score: PromptScore | None = None, *, now: float
    ) -> EvaluationChange | None:
        evaluation = self.under_way
        if evaluation is None or not slots:
            return None
        dropped = sum(slot.state is SlotState.ABANDONED for slot in slots)
        if score is not None or dropped:
            scores = self._scores if score is None else {**self._scores, score.slot: score}
            dropped += self._leases.counts()[SlotState.ABANDONED]
            evaluation = scored(evaluation, scores.values(), dropped=dropped)
        if not evaluation.waiting_prompts:
            evaluation = replace(evaluation, finished_at_s=now)
        return EvaluationChange(evaluation, slots, score)

    def _without_prompts(self) -> Leases:
        """Return leases on no slot yet; they lease only slots that are put in, since none is made."""
        return Leases(
            prompts=None,
            seed=0,
            lease_ttl_s=self._lease_ttl_s,
            slots=(),
            settled={},
            next_slot=0,
            lost=LostSlots(),
            now=0.0,
        )

    def _is_due(self, head: int) -> bool:
        every, newest = self._settings.every_versions, self._status.newest
        return every > 0 and (newest is None or head // every > newest.version // every)

    def _own(self, lease_ids: Iterable[str]) -> list[str]:
        """Return those of the evaluation under way, as its slots' ids."""
        if self.under_way is None:
            return []
        parsed = (_parse(lease_id) for lease_id in lease_ids)
        return [group_id(*rest) for version, *rest in parsed if version == self.under_way.version]


def _ended(evaluation: Evaluation, *, now: float) -> Evaluation:
    """Return an evaluation as it stands; the prompts that still wait are dropped."""
    dropped = evaluation.prompts - evaluation.counted_prompts
    return replace(evaluation, dropped_prompts=dropped, finished_at_s=now)


def _recorded(status: EvaluationStatus, finished: Evaluation) -> EvaluationStatus:
    first, best = status.first, status.best
    if first is None or first.terms != finished.terms:
        first, best = finished, None
    is_whole = 2 * finished.counted_prompts > finished.prompts
    if is_whole and (best is None or finished.reward_mean > best.reward_mean):
        best = finished
    return EvaluationStatus(newest=finished, first=first, best=best)


def _parse(lease_id: str) -> tuple[int, int, int]:
    """Return (version, slot, attempt); numbers that do not exist where it is no lease for evaluation."""
    match = _LEASE_ID.fullmatch(lease_id)
    return (int(match[1]), *slot_and_attempt(match[2])) if match else (-1, -1, 0)
