"""Several processes of one task, so that a request that hangs holds up no other.

    request --> one is idle: its --> else wait; no one free for a moment: one process more, up to the bound

Grading goes before prompts: it finishes work that is held. A task that answers at once is served by one
process for ever; one that is slow, or hangs, gets as many as are allowed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sampler.tasks.grader import Grader, TaskDescription

PATIENCE_S: Final = 0.1
"""Longer than a task that answers at once keeps requests waiting, short against any limit of time."""


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """A prompt and the process that made it."""

    text: str
    grader: int
    incarnation: int


class GraderPool:
    """Prompts of one task and rewards for their completions.

    Args:
        make: Makes one more grader of the task.
        most: Processes at most.
    """

    def __init__(self, make: Callable[[], Grader], *, most: int, patience_s: float = PATIENCE_S) -> None:
        self._make = make
        self._most = most
        self._patience_s = patience_s
        self._graders = [make()]
        self._idle = [0]
        self._gradings: deque[asyncio.Future[int]] = deque()
        self._prompts: deque[asyncio.Future[int]] = deque()
        self._grown_at_s = -patience_s
        self._is_stateful = False

    @property
    def processes(self) -> int:
        """How many run."""
        return sum(grader.is_running for grader in self._graders)

    @property
    def waiting(self) -> int:
        """Requests that no process works on; bounded by the leases that are worked on."""
        return len(self._gradings) + len(self._prompts)

    async def start(self) -> TaskDescription:
        """Start the first process and return what the task says of itself.

        Raises:
            TaskUnusableError, TaskError: see ``Grader.describe``.
        """
        description = await self._graders[0].describe()
        self._is_stateful = description.is_stateful
        return description

    async def prompt(self, index: int) -> TaskPrompt:
        """Ask for a prompt; see ``Grader.prompt``."""
        number = await self._take(self._prompts)
        try:
            text = await self._graders[number].prompt(index)
            return TaskPrompt(text, number, self._graders[number].incarnation)
        finally:
            self._give(number)

    async def grade(self, prompt: TaskPrompt, index: int, texts: Sequence[str]) -> list[float]:
        """Return one finite reward per text; see ``Grader.grade``."""
        if self._is_stateful:
            return await self._graders[prompt.grader].grade(index, texts, incarnation=prompt.incarnation)
        number = await self._take(self._gradings)
        try:
            return await self._graders[number].grade(index, texts)
        finally:
            self._give(number)

    async def close(self) -> None:
        """End every process."""
        for grader in self._graders:
            await grader.close()

    async def _take(self, queue: deque[asyncio.Future[int]]) -> int:
        if self._idle:
            # Whoever was killed starts again only when nobody else is idle.
            number = next((n for n in reversed(self._idle) if self._graders[n].is_running), self._idle[-1])
            self._idle.remove(number)
            return number
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            while not place.done():
                await asyncio.wait({place}, timeout=self._patience_s)
                if not place.done() and self._may_grow():
                    queue.remove(place)
                    return self._grown()
            return place.result()
        except asyncio.CancelledError:
            if place.done():
                self._give(place.result())
            else:
                queue.remove(place)
            raise

    def _give(self, number: int) -> None:
        queue = self._gradings or self._prompts
        if queue:
            queue.popleft().set_result(number)
        else:
            self._idle.append(number)

    def _may_grow(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return len(self._graders) < self._most and now_s >= self._grown_at_s + self._patience_s

    def _grown(self) -> int:
        self._grown_at_s = asyncio.get_running_loop().time()
        self._graders.append(self._make())
        return len(self._graders) - 1
