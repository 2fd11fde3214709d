"""Runs several processes of one task, so that a request that hangs delays no other.

    request --> an idle process, else wait for one
    a request takes long --> fewer than two others are quick --> start one more meanwhile, up to a bound

Grading and replies go before prompts, because they finish work that is held. A task that answers at once is
served by one process. New processes load what the task needs while the others work.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sampler.tasks.grader_process import Grader, Grades, TaskDescription, TaskError
from sampler.tasks.task import CompletionText, Message

SLOW_S: Final = 0.1
"""A request that takes longer may hang. Longer than a fast task takes, and far below any limit."""

QUICK: Final = 2
"""Processes to have besides those that may hang, once one may: one works while the other is spare."""


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """A prompt, and the grader whose ``incarnation``-th process made it."""

    content: str | list[Message]
    """A text, or messages for the model's chat template."""
    grader: Grader
    incarnation: int


class GraderPool:
    """Prompts of one task and rewards for their completions, by at most ``most`` graders."""

    def __init__(self, make: Callable[[], Grader], *, most: int, slow_s: float = SLOW_S) -> None:
        self._make = make
        self._most = most
        self._slow_s = slow_s
        self._graders = [make()]
        self._idle = [*self._graders]
        self._slow: set[Grader] = set()
        self._starting: dict[Grader, asyncio.Task[None]] = {}
        self._gradings: deque[asyncio.Future[Grader]] = deque()
        self._prompts: deque[asyncio.Future[Grader]] = deque()
        self._is_stateful = False

    @property
    def processes(self) -> int:
        """Number of running processes."""
        return sum(grader.is_running for grader in self._graders)

    @property
    def waiting(self) -> int:
        """Requests that wait for a process; bounded by the completions being worked on."""
        return len(self._gradings) + len(self._prompts)

    async def start(self) -> TaskDescription:
        """Start the first process and return what the task declares; errors as of ``Grader.describe``."""
        description = await self._graders[0].describe()
        self._is_stateful = description.is_stateful
        return description

    async def prompt(self, index: int, row: str = "") -> TaskPrompt:
        """Return a prompt; see ``Grader.prompt``."""
        async with self._any(self._prompts) as grader:
            return TaskPrompt(await grader.prompt(index, row), grader, grader.incarnation)

    async def grade(
        self, prompt: TaskPrompt, index: int, completions: Sequence[CompletionText], row: str = ""
    ) -> Grades:
        """Return what the grader says of the completions; see ``Grader.grade``."""
        async with self._grader_for(prompt) as (grader, incarnation):
            return await grader.grade(index, completions, row=row, incarnation=incarnation)

    async def reply(
        self, prompt: TaskPrompt, index: int, conversation: Sequence[Message], row: str = ""
    ) -> str | list[Message] | None:
        """Return what the task says next in a conversation; see ``Grader.reply``."""
        async with self._grader_for(prompt) as (grader, incarnation):
            return await grader.reply(index, conversation, row=row, incarnation=incarnation)

    async def close(self) -> None:
        """End every process."""
        starting = tuple(self._starting.values())
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for grader in self._graders:
            await grader.close()

    @contextlib.asynccontextmanager
    async def _grader_for(self, prompt: TaskPrompt) -> AsyncIterator[tuple[Grader, int | None]]:
        """Lend the process that made a prompt, where the task is stateful, or else any."""
        if not self._is_stateful:
            async with self._any(self._gradings) as grader:
                yield grader, None
            return
        was_idle = prompt.grader in self._idle
        if was_idle:
            self._idle.remove(prompt.grader)  # No prompt should wait behind this.
        try:
            with self._watched(prompt.grader):
                yield prompt.grader, prompt.incarnation
        finally:
            if was_idle:
                self._give(prompt.grader)

    @contextlib.asynccontextmanager
    async def _any(self, queue: deque[asyncio.Future[Grader]]) -> AsyncIterator[Grader]:
        """Lend the next process that is free."""
        grader = await self._take(queue)
        try:
            with self._watched(grader):
                yield grader
        finally:
            self._give(grader)

    @contextlib.contextmanager
    def _watched(self, grader: Grader) -> Iterator[None]:
        notice = asyncio.get_running_loop().call_later(self._slow_s, self._note_slow, grader)
        try:
            yield
        finally:
            notice.cancel()
            self._slow.discard(grader)

    async def _take(self, queue: deque[asyncio.Future[Grader]]) -> Grader:
        if self._idle:
            # A process that was killed is restarted only when no other is idle.
            grader = next((one for one in reversed(self._idle) if one.is_running), self._idle[-1])
            self._idle.remove(grader)
            return grader
        place: asyncio.Future[Grader] = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place in queue:
                queue.remove(place)
            elif not place.cancelled():
                self._give(place.result())
            raise

    def _give(self, grader: Grader) -> None:
        for queue in (self._gradings, self._prompts):
            while queue:
                place = queue.popleft()
                if not place.done():
                    place.set_result(grader)
                    return
        self._idle.append(grader)

    def _note_slow(self, grader: Grader) -> None:
        self._slow.add(grader)
        running = {one for one in self._graders if one.is_running}
        if len((running | self._starting.keys()) - self._slow) >= QUICK:
            return
        stopped = next((one for one in self._idle if one not in running), None)
        if stopped is not None:
            self._idle.remove(stopped)
        elif len(self._graders) < self._most:
            stopped = self._make()
            stopped.code_digest = self._graders[0].code_digest
            self._graders.append(stopped)
        else:
            return
        self._starting[stopped] = asyncio.create_task(self._start(stopped))

    async def _start(self, grader: Grader) -> None:
        # If it does not start, the next request tries again and reports the error.
        with contextlib.suppress(TaskError):
            await grader.describe()
        del self._starting[grader]
        self._give(grader)
