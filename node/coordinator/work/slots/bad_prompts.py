"""Prompts that could not be answered: who says so, and when each is tried again; pure.

    fine --a sampler fails it--> withheld from it --another sampler fails it--> aside for everybody
      ^                           |        ^                                     |
      |                     after retry_s  |                    after retry_s, doubled each time
      |<--- a group comes --------'        '------ a sampler fails it -- due <---'

One sampler's word keeps a prompt from that sampler alone: its context may be short, or its grader broken.
Others get it, and where they answer, the fault was the sampler's. Alone in a run, a sampler is the judge of
its prompts, until another one joins. Not more than half of the prompts are kept from anybody: beyond, those
that have waited longest are tried again.

Every epoch asks every prompt. Pauses are in time, not in epochs, so that an outage that failed every prompt
ends by itself.
"""

import enum
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from node.values.fact import Gone
from node.values.groups.failure import BadPrompt, Failure, detail_of

BAD_PROMPTS: Final = 16_384
"""Prompts remembered, some MB. Beyond, the oldest are forgotten, and would be tried as if they were new."""

LONGEST_RETRY_S: Final = 86_400.0
"""Pauses double up to this, or stay as configured where that is longer."""

WITNESSES: Final = 2
"""Samplers that must have failed a prompt before nobody is asked it."""

MOST_WITNESSES: Final = 8
"""Samplers remembered for a prompt."""

EVERYBODY: Final = ""

PromptFacts: TypeAlias = tuple[BadPrompt | Gone, ...]
"""Bad prompts as they are to become, and those that are like any other again."""


class Aside(enum.Enum):
    """Whether a prompt is leased to a sampler."""

    NOT = enum.auto()
    FOR_IT = enum.auto()
    """Others get it."""
    FOR_ALL = enum.auto()


@dataclass(frozen=True, slots=True)
class Report:
    """Samplers that could not answer a prompt."""

    prompt_index: int
    sampler_ids: tuple[str, ...]
    reason: Failure
    detail: str
    slot: int


class BadPrompts:
    def __init__(self, bad: Iterable[BadPrompt] = (), *, retry_s: float) -> None:
        """Restore from what the ledger holds; ``retry_s`` is the first pause."""
        self._retry_s = retry_s
        self._bad: dict[int, BadPrompt] = {}
        """Bad prompts, oldest failure first."""
        self._kept_from: Counter[str] = Counter()
        """How many of them are kept from whom alone, or from EVERYBODY."""
        for entry in sorted(bad, key=lambda entry: entry.at_s):
            self._put(entry)

    def __len__(self) -> int:
        return len(self._bad)

    def __contains__(self, prompt_index: int) -> bool:
        return prompt_index in self._bad

    def aside(self, prompt_index: int, sampler_id: str, *, now: float) -> Aside:
        entry = self._bad.get(prompt_index)
        if entry is None or not _is_active(entry, now):
            return Aside.NOT
        if _is_agreed(entry):
            return Aside.FOR_ALL
        return Aside.FOR_IT if sampler_id in entry.said_by else Aside.NOT

    def is_kept_from_some(self, prompt_index: int, *, now: float) -> bool:
        entry = self._bad.get(prompt_index)
        return entry is not None and _is_active(entry, now)

    def newest(self, n: int) -> tuple[BadPrompt, ...]:
        return tuple(heapq.nlargest(n, self._bad.values(), key=lambda entry: (entry.at_s, entry.slot)))

    def reasons(self) -> dict[str, int]:
        return dict(Counter(entry.reason.value for entry in self._bad.values()))

    def contradicted(self, prompt_index: int, answered_by: str, *, now: float) -> tuple[str, ...]:
        """Return the sampler that failed a prompt of late which another one has answered, if there is one."""
        entry = self._bad.get(prompt_index)
        if (
            entry is None
            or not _is_active(entry, now)
            or _is_agreed(entry)
            or entry.reason is Failure.EXPIRED
        ):
            return ()
        return tuple(name for name in entry.said_by if name != answered_by)

    def after(self, reports: Iterable[Report], *, prompts: int | None, now: float) -> PromptFacts:
        """Return what reports change, in a task of so many ``prompts``."""
        changed: dict[int, BadPrompt] = {}
        for report in reports:
            before = changed.get(report.prompt_index, self._bad.get(report.prompt_index))
            for sampler_id in report.sampler_ids:
                before = self._failed(before, report, sampler_id, now=now)
            if before is not None and before is not self._bad.get(report.prompt_index):
                changed[report.prompt_index] = before
        if not changed:
            return ()
        lifted = self._beyond_half(changed, prompts=prompts)
        lifted |= self._beyond_room(changed, lifted)
        return (*(entry for n, entry in changed.items() if n not in lifted), *self.lifted(*sorted(lifted)))

    def without(self, sampler_ids: Collection[str] | None) -> PromptFacts:
        """Return what is left without the word of some samplers; None: of all."""
        bad: list[BadPrompt | Gone] = []
        for entry in self._bad.values():
            left = () if sampler_ids is None else tuple(n for n in entry.said_by if n not in sampler_ids)
            if not left:
                bad += self.lifted(entry.prompt_index)
            elif left != entry.said_by:
                bad.append(self._timed(replace(entry, said_by=left)))
        return tuple(bad)

    def lifted(self, *prompt_indices: int) -> PromptFacts:
        """Return the end of what is held against prompts; nothing where nothing is."""
        return tuple(Gone(BadPrompt.kind, str(n)) for n in prompt_indices if n in self._bad)

    def apply(self, fact: BadPrompt | Gone) -> None:
        if isinstance(fact, Gone):
            self._drop(int(fact.key))
        else:
            self._put(fact)

    def _failed(self, before: BadPrompt | None, report: Report, sampler_id: str, *, now: float) -> BadPrompt:
        detail = detail_of(report.detail)
        if before is None or not _is_active(before, now):
            times = 1 if before is None else before.times + _is_agreed(before)
            entry = BadPrompt(
                report.prompt_index, report.reason, detail, times, report.slot, now, (sampler_id,)
            )
            return self._timed(entry)
        if sampler_id in before.said_by or len(before.said_by) >= MOST_WITNESSES:
            return before
        said_by = (*before.said_by, sampler_id)
        if _is_agreed(before):
            return replace(before, said_by=said_by)
        return self._timed(
            replace(before, said_by=said_by, reason=report.reason, detail=detail, slot=report.slot, at_s=now)
        )

    def _beyond_half(self, fresh: Mapping[int, BadPrompt], *, prompts: int | None) -> set[int]:
        """Return the prompts to lift so that everybody gets half of them once ``fresh`` ones are in."""
        most = (prompts or 0) // 2
        counts = Counter(self._kept_from)
        counts.subtract(_kept_from(self._bad[n]) for n in fresh if n in self._bad)
        counts.update(map(_kept_from, fresh.values()))
        lifted: set[int] = set()
        for whom in sorted({_kept_from(entry) for entry in fresh.values()}):
            surplus = counts[whom] + (counts[EVERYBODY] if whom else 0) - most - len(lifted)
            older = (entry for n, entry in self._bad.items() if n not in fresh)
            theirs = (
                entry.prompt_index
                for entry in itertools.chain(older, fresh.values())
                if _kept_from(entry) in (whom, EVERYBODY) and entry.prompt_index not in lifted
            )
            lifted.update(list(itertools.islice(theirs, max(0, surplus))))
        return lifted

    def _beyond_room(self, fresh: Mapping[int, BadPrompt], lifted: Collection[int]) -> set[int]:
        """Return the oldest prompts, to be forgotten so that no more than BAD_PROMPTS are remembered."""
        surplus = len(self._bad.keys() | fresh.keys()) - len(lifted) - BAD_PROMPTS
        oldest = (n for n in self._bad if n not in fresh and n not in lifted)
        return set(itertools.islice(oldest, max(0, surplus)))

    def _put(self, entry: BadPrompt) -> None:
        self._drop(entry.prompt_index)
        self._bad[entry.prompt_index] = self._timed(entry)
        self._kept_from[_kept_from(entry)] += 1

    def _drop(self, prompt_index: int) -> None:
        if (entry := self._bad.pop(prompt_index, None)) is not None:
            self._kept_from[_kept_from(entry)] -= 1

    def _timed(self, entry: BadPrompt) -> BadPrompt:
        doublings = min(entry.times - 1, 40) if _is_agreed(entry) else 0
        pause_s = min(self._retry_s * 2**doublings, max(LONGEST_RETRY_S, self._retry_s))
        return replace(entry, retry_at_s=entry.at_s + pause_s)


def _is_agreed(entry: BadPrompt) -> bool:
    return len(entry.said_by) >= WITNESSES


def _kept_from(entry: BadPrompt) -> str:
    return entry.said_by[0] if len(entry.said_by) == 1 else EVERYBODY


def _is_active(entry: BadPrompt, now: float) -> bool:
    # A clock that was set back must not keep prompts aside for as long as it was wrong.
    return entry.at_s <= now < entry.retry_at_s
