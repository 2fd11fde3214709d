"""A sampler whose engine is simulated: who is drawn, who waits, how full the cache is.

leases, a round trip later --> work queue --> waiting --> drawn, a token a step --> finished
                                                 ^           |
                                                 '-- dropped-' where the cache is full
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import numpy as np

from node.values.groups.rollout import PromptLease
from sampler.engines.engine import EngineUse
from sampler.rollouts.concurrency import Concurrency
from sampler.rollouts.work_queue import JobState, WorkQueue
from support.graded_texts import prompt_of
from support.groups import SAMPLING

STEP_S: Final = 0.03
READING_STEPS: Final = 3
COMPLETIONS: Final = 8
PROMPT: Final = replace(prompt_of(7), token_ids=np.array([1, 2], np.int32))


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds of the engine, and how long completions are: log-normal, cut off at ``most_tokens``."""

    batch: int
    cache_tokens: int
    median_tokens: float
    most_tokens: int
    sigma: float = 0.7
    prompt_tokens: int = 20
    lease_steps: int = 5
    """Round trip to the hub."""


@dataclass(slots=True, eq=False)
class _Row:
    lease_id: str
    length: int
    tokens: int = 0


class SimulatedEngine:
    """Draws the completions that came first, as many as batch and cache hold."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.drawn: list[_Row] = []
        self.queue: deque[_Row] = deque()
        self.cached = 0
        self.tokens = 0
        self.preempted = 0
        self._left: dict[str, int] = {}
        self._unbegun: set[str] = set()

    @property
    def running(self) -> int:
        return len(self._left)

    @property
    def waiting(self) -> int:
        return len(self._unbegun)

    @property
    def use(self) -> EngineUse:
        return EngineUse.of(
            places_share=(len(self.drawn) + len(self.queue)) / self.shape.batch,
            waiting=len(self.queue),
            wanted=COMPLETIONS * self.running,
            cache_share=self.cached / self.shape.cache_tokens,
        )

    def add(self, lease_id: str, lengths: list[int]) -> None:
        self._left[lease_id] = len(lengths)
        self._unbegun.add(lease_id)
        self.queue += (_Row(lease_id, length) for length in lengths)

    def step(self) -> list[str]:
        """Draw a token of each completion that has a place; return the groups this finishes."""
        room = self.shape.cache_tokens
        while self.cached + len(self.drawn) > room:
            self.queue.appendleft(row := self.drawn.pop())
            self.cached -= self._held(row)
            self.preempted += 1
        while self.queue and len(self.drawn) < self.shape.batch:
            row = self.queue[0]
            if self.cached + self._held(row) + len(self.drawn) + 1 > room:
                break
            self.drawn.append(self.queue.popleft())
            self.cached += self._held(row)
            self._unbegun.discard(row.lease_id)
        for row in self.drawn:
            row.tokens += 1
        self.cached += len(self.drawn)
        self.tokens += len(self.drawn)
        ended = [row for row in self.drawn if row.tokens >= row.length]
        self.drawn = [row for row in self.drawn if row.tokens < row.length]
        for row in ended:
            self.cached -= self._held(row)
            self._left[row.lease_id] -= 1
        finished = [lease_id for lease_id, left in self._left.items() if not left]
        for lease_id in finished:
            del self._left[lease_id]
        return finished

    def _held(self, row: _Row) -> int:
        return self.shape.prompt_tokens + row.tokens


@dataclass(slots=True)
class Seen:
    """A look back at a number of steps."""

    steps: int = 0
    tokens: int = 0
    groups: int = 0
    """Finished."""
    cache_share: float = 0.0
    queue_share: float = 0.0
    """Groups that wait over those being drawn. These three are means."""
    preempted: int = 0
    numbers: list[int] = field(default_factory=list)
    """Groups at once: at first, and after each change."""


class SimulatedSampler:
    """Keeps an engine busy with a number of groups that is fixed, or follows the engine."""

    def __init__(self, shape: Shape, *, seed: int, fixed: int | None = None) -> None:
        self.engine = SimulatedEngine(shape)
        self.most_leases = 1 << 20
        """Leases that the hub lets it hold; a grant of fewer than were asked for holds the sampler back."""
        self._shape = shape
        self._random = Random(seed)
        self._steps = 0
        self._asked: tuple[int, int] | None = None
        """When leases come, and how many were asked for."""
        self._leases = 0
        self._is_held_back = True
        self._concurrency = None if fixed else Concurrency(now=0.0)
        groups = fixed or Concurrency(now=0.0).groups
        self.work_queue = WorkQueue(concurrency_groups=groups, unsubmitted_groups=16)

    def change_lengths(self, factor: float) -> None:
        self._shape = replace(
            self._shape,
            median_tokens=factor * self._shape.median_tokens,
            most_tokens=int(factor * self._shape.most_tokens),
        )

    def run(self, steps: int, *, until: Callable[[Seen], bool] = lambda _: False) -> Seen:
        """Take steps, and return what they looked like."""
        seen = Seen(numbers=[self.work_queue.concurrency_groups])
        tokens, preempted = self.engine.tokens, self.engine.preempted
        for _ in range(steps):
            self._step(seen)
            if until(seen):
                break
        seen.cache_share /= seen.steps
        seen.queue_share /= seen.steps
        seen.tokens = self.engine.tokens - tokens
        seen.preempted = self.engine.preempted - preempted
        return seen

    def _step(self, seen: Seen) -> None:
        self._steps += 1
        now = self._steps * STEP_S
        self._lease(now)
        while (job := self.work_queue.begin_next(now=now)) is not None:
            self.engine.add(job.lease.lease_id, [self._length() for _ in range(COMPLETIONS)])
        finished = self.engine.step()
        for lease_id in finished:
            self.work_queue.finish(lease_id, now=now)
            self.work_queue.settle(lease_id)
        if self._concurrency is not None and self._steps % READING_STEPS == 0:
            self._concurrency.note(
                self.engine.use,
                is_held_back=self._is_held_back,
                group_s=self.work_queue.group_s,
                now=now,
            )
            self.work_queue.concurrency_groups = self._concurrency.groups
        seen.steps += 1
        seen.groups += len(finished)
        seen.cache_share += self.engine.cached / self._shape.cache_tokens
        seen.queue_share += self.engine.waiting / max(1, self.engine.running - self.engine.waiting)
        if seen.numbers[-1] != self.work_queue.concurrency_groups:
            seen.numbers.append(self.work_queue.concurrency_groups)

    def _lease(self, now: float) -> None:
        if self._asked is None and (room := self.work_queue.room()):
            self._asked = (self._steps + self._shape.lease_steps, room)
        if self._asked is None or self._asked[0] > self._steps:
            return
        asked, self._asked = self._asked[1], None
        granted = min(asked, self.most_leases - self.work_queue.count(JobState.GENERATING))
        self._is_held_back = granted < asked
        for _ in range(granted):
            self._leases += 1
            lease_id = f"{self._leases}.1"
            self.work_queue.take(PromptLease(lease_id, "addition", 0, COMPLETIONS, SAMPLING, 60.0), now=now)
            self.work_queue.make_ready(lease_id, PROMPT, now=now)

    def _length(self) -> int:
        shape = self._shape
        drawn = int(shape.median_tokens * self._random.lognormvariate(0.0, shape.sigma))
        return min(max(1, drawn), shape.most_tokens)
