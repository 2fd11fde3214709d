"""Runs several processes of one task, so that a request that hangs delays no other.

    request --> an idle process, else wait for one
    a request takes long --> fewer than two others are quick --> start one more meanwhile, up to a bound

Grading and replies go before prompts, because they finish work that is held. A task that answers at once is
served by one process. New processes load what the task needs while the others work.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.system.waits import drop
from sampler.tasks.processes.grader_process import Grader
from sampler.tasks.processes.grader_requests import (
    Grades,
    Request,
    TaskDescription,
    TaskError,
    given,
    grades_in,
    said_in,
)
from sampler.tasks.task import CompletionText, Message

SLOW_S: Final = 0.1
"""A request that takes longer may hang. Longer than a fast task takes, and far below any limit."""

LOOKS: Final = 4
"""A request is slow once the event loop has looked for its answer this often, over ``SLOW_S``: a loop that is
late itself has not read answers that are there. An engine that held the interpreter lock once had every
process taken for one that hangs, and a seventh of the loop's time went into starting more."""

_ORDER: Final = (Request.GRADE, Request.REPLY, Request.PROMPT)

QUICK: Final = 2
"""Processes to have besides those that may hang, once one may: one works while the other is spare."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt, made once for its lease: sampled from, recorded and graded."""

    index: int
    row: str
    """A JSON object; empty: the run has no data."""
    content: str | list[Message]
    """A text, or messages for the model's chat template."""
    grader: Grader
    incarnation: int
    """Which process of that grader made it."""
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[n], once it is tokenized."""
    rendered: str = ""
    """As the model reads it, for graders that see it."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this prompt alone."""


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
        self._waiting: dict[Request, deque[asyncio.Future[Grader]]] = {kind: deque() for kind in _ORDER}
        self._is_stateful = False

    @property
    def processes(self) -> int:
        """Number of running processes."""
        return sum(grader.is_running for grader in self._graders)

    @property
    def waiting(self) -> int:
        """Requests that wait for a process; bounded by the completions being worked on."""
        return sum(map(len, self._waiting.values()))

    async def start(self) -> TaskDescription:
        """Start the first process and return what the task declares; errors as of ``Grader.describe``."""
        description = await self._graders[0].describe()
        self._is_stateful = description.is_stateful
        return description

    async def prompt(self, index: int, row: str = "") -> Prompt:
        """Return a prompt, from one call of the task's ``prompt``.

        Raises:
            TaskError: the call raised, was killed at a limit, or returned no prompt or too much.
        """
        async with self._any(Request.PROMPT) as grader:
            reply = await grader.ask(Request.PROMPT, {"index": index, "row": row})
            content = said_in(reply, Request.PROMPT)
            arguments = reply.get("template_arguments")
            return Prompt(
                index,
                row,
                content,
                grader,
                grader.incarnation,
                template_arguments=arguments if isinstance(arguments, dict) else {},
            )

    async def reply(self, prompt: Prompt, conversation: Sequence[Message]) -> str | list[Message] | None:
        """Return what the task says next, from one call of its ``reply``; None: the conversation is over.

        Args:
            conversation: What was said since the prompt.
        Raises:
            TaskError: as for ``prompt`` and ``grade``.
        """
        said = [dict(message) for message in conversation]
        reply = await self._ask(prompt, Request.REPLY, conversation=said)
        return None if reply.get("is_over") else said_in(reply, Request.REPLY)

    async def grade(self, prompt: Prompt, completions: Sequence[CompletionText]) -> Grades:
        """Return one finite reward for each completion, and what else the grader measured.

        Raises:
            TaskError: the grader raised, was killed at a limit, or returned something else; without a fault:
                what it needs is not available, or the process that has to do it has ended.
        """
        reply = await self._ask(prompt, Request.GRADE, **given(completions))
        return grades_in(reply, completions)

    async def grade_again(
        self, index: int, row: str, completions: Sequence[CompletionText]
    ) -> tuple[Grades, float]:
        """Return what ``grade`` does, for a prompt that was made elsewhere, and the seconds that it took
        without the wait for a process; not for stateful tasks."""
        request = {"index": index, "row": row, **given(completions)}
        async with self._any(Request.GRADE) as grader:
            began_s = time.monotonic()
            reply = await grader.ask(Request.GRADE, request)
            return grades_in(reply, completions), time.monotonic() - began_s

    async def close(self) -> None:
        """End every process."""
        starting = tuple(self._starting.values())
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for grader in self._graders:
            await grader.close()

    async def _ask(self, prompt: Prompt, kind: Request, **given: Any) -> dict[str, Any]:
        """Ask the process that made a prompt, where the task is stateful, or else any."""
        request = {"index": prompt.index, "row": prompt.row, **given}
        if not self._is_stateful:
            async with self._any(kind) as grader:
                return await grader.ask(kind, request)
        was_idle = prompt.grader in self._idle
        if was_idle:
            self._idle.remove(prompt.grader)  # No prompt should wait behind this.
        try:
            with self._watched(prompt.grader):
                return await prompt.grader.ask(kind, request, incarnation=prompt.incarnation)
        finally:
            if was_idle:
                self._give(prompt.grader)

    @contextlib.asynccontextmanager
    async def _any(self, kind: Request) -> AsyncIterator[Grader]:
        """Lend the next process that is free."""
        grader = await self._take(self._waiting[kind])
        try:
            with self._watched(grader):
                yield grader
        finally:
            self._give(grader)

    @contextlib.contextmanager
    def _watched(self, grader: Grader) -> Iterator[None]:
        watching = asyncio.create_task(self._watch(grader))
        try:
            yield
        finally:
            drop(watching)
            self._slow.discard(grader)

    async def _watch(self, grader: Grader) -> None:
        for _ in range(LOOKS):
            await asyncio.sleep(self._slow_s / LOOKS)
        self._note_slow(grader)

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
        for queue in self._waiting.values():
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
