"""Prompts that nobody could answer, and when each is tried again; pure.

    fine --its slot is abandoned--> aside --after retry_s, doubled each time--> due --group comes--> fine
                                      ^                                          |
                                      '-------------- one failure ---------------'

Every epoch asks every prompt. One that is aside is passed over, so that it costs its attempts once and not in
every epoch; one that is due is leased like any other, and abandoned again at its first failure. Pauses are
in time, not in epochs, so that an outage that failed every prompt ends by itself.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from node.coordinator.work.slots import Slot, SlotState
from node.failure import BadPrompt, Failure, detail_of

BAD_PROMPTS: Final = 16_384
"""Prompts remembered, some MB. Beyond, the oldest are forgotten, and would be tried as if they were new."""

LONGEST_RETRY_S: Final = 86_400.0
"""Pauses double up to this, or stay as configured where that is longer."""


class BadPrompts:
    """The bad prompts of a run."""

    def __init__(self, bad: Iterable[BadPrompt] = (), *, retry_s: float) -> None:
        """Restore from what the ledger holds; ``retry_s`` is the first pause."""
        self._retry_s = retry_s
        self._bad: dict[int, BadPrompt] = {}
        for entry in sorted(bad, key=lambda entry: entry.at_s):
            self._put(entry)

    def __len__(self) -> int:
        return len(self._bad)

    def __contains__(self, prompt_index: int) -> bool:
        """Whether its newest slot was abandoned: one failure more is enough."""
        return prompt_index in self._bad

    def is_aside(self, prompt_index: int, *, now: float) -> bool:
        """Whether the prompt is to be passed over."""
        entry = self._bad.get(prompt_index)
        # A clock that was set back must not keep prompts aside for as long as it was wrong.
        return entry is not None and entry.at_s <= now < entry.retry_at_s

    def aside(self, now: float) -> int:
        """Count the prompts that are passed over."""
        return sum(self.is_aside(prompt_index, now=now) for prompt_index in self._bad)

    def are_all_aside(self, prompts: int, *, now: float) -> bool:
        """Whether each of a task's ``prompts`` is passed over."""
        return len(self._bad) >= prompts and self.aside(now) >= prompts

    def newest(self, n: int) -> tuple[BadPrompt, ...]:
        """Return the ``n`` prompts abandoned last, newest first."""
        return tuple(heapq.nlargest(n, self._bad.values(), key=lambda entry: (entry.at_s, entry.slot)))

    def reasons(self) -> dict[str, int]:
        """Count the prompts by the reason they were abandoned for."""
        return dict(Counter(entry.reason.value for entry in self._bad.values()))

    def entries(
        self, slots: Iterable[Slot], *, details: Mapping[int, str], now: float
    ) -> tuple[BadPrompt, ...]:
        """Return entries for the prompts of those slots that are abandoned because of their prompt.

        Args:
            slots: As they are to become.
            details: What was said of the last attempt, by slot.
        """
        bad = []
        for slot in slots:
            reason = slot.last_failure
            if slot.state is SlotState.ABANDONED and reason is not None and reason is not Failure.REFUSED:
                detail = detail_of(details.get(slot.number, ""))
                bad.append(
                    self.abandoned(slot.prompt_index, reason=reason, detail=detail, slot=slot.number, now=now)
                )
        return tuple(bad)

    def abandoned(
        self, prompt_index: int, *, reason: Failure, detail: str, slot: int, now: float
    ) -> BadPrompt:
        """Return the entry of a prompt whose slot is abandoned."""
        before = self._bad.get(prompt_index)
        times = 1 if before is None else before.times + 1
        return self._timed(BadPrompt(prompt_index, reason, detail, times, slot, now))

    def apply(self, bad: Iterable[BadPrompt], *, lifted: Iterable[int]) -> None:
        """Make decided entries the truth."""
        for prompt_index in lifted:
            self._bad.pop(prompt_index, None)
        for entry in bad:
            self._put(entry)

    def _put(self, entry: BadPrompt) -> None:
        self._bad.pop(entry.prompt_index, None)
        self._bad[entry.prompt_index] = self._timed(entry)
        while len(self._bad) > BAD_PROMPTS:
            del self._bad[next(iter(self._bad))]

    def _timed(self, entry: BadPrompt) -> BadPrompt:
        doublings = min(entry.times - 1, 40)
        pause_s = min(self._retry_s * 2**doublings, max(LONGEST_RETRY_S, self._retry_s))
        return replace(entry, retry_at_s=entry.at_s + pause_s)
