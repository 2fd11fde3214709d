"""Grading in a process of its own, which is killed when it takes too long and started again.

    (none) --grade--> started --ready--> idle <--grade/rewards--> busy
       ^                                                            | wall limit, died, nonsense
       +------------------------ killed ----------------------------+

One request is one attempt: a group whose grader was killed has no reward, and the caller decides.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from sampler.tasks.framing import LENGTH, REPLY_BYTES, framed

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
"""Time for a task to import what it needs; not counted against any group."""


class GradingError(Exception):
    """A group could not be graded; ``str()`` says why."""


class Grader:
    """Rewards for one task's completions, one group at a time.

    Args:
        path: ``package.module:Class`` of the task.
        wall_limit_s: For one group, from request to rewards.
        cpu_limit_s: For one group, in whole seconds; the kernel ends the process after it.
        memory_limit_bytes: Address space of the process.
        killed: Called each time the process was killed or died.
    """

    def __init__(
        self,
        path: str,
        *,
        wall_limit_s: float,
        cpu_limit_s: int,
        memory_limit_bytes: int,
        killed: Callable[[], None],
    ) -> None:
        self._arguments = (path, str(cpu_limit_s), str(memory_limit_bytes))
        self._wall_limit_s = wall_limit_s
        self._killed = killed
        self._process: asyncio.subprocess.Process | None = None
        self._busy = asyncio.Lock()

    async def grade(self, index: int, texts: Sequence[str]) -> list[float]:
        """Give one finite reward per text.

        Raises:
            GradingError: the grader raised, was killed at a limit, or gave something else.
        """
        async with self._busy:
            process = await self._running()
            try:
                async with asyncio.timeout(self._wall_limit_s):
                    reply = await _asked(process, {"index": index, "texts": list(texts)})
            except TimeoutError:
                await self._kill()
                raise GradingError(f"killed after {self._wall_limit_s} s") from None
            except (OSError, EOFError, ValueError) as error:
                await self._kill()
                raise GradingError(f"the grader died: {type(error).__name__}: {error}") from error
            except asyncio.CancelledError:
                # Its answer would be taken for the next group's.
                await self._kill()
                raise
            return _rewards(reply, len(texts))

    async def close(self) -> None:
        """End the process."""
        async with self._busy:
            if self._process is not None:
                await _ended(self._process)
                self._process = None

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sampler.tasks.grader_worker",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # What this process can import, the grader can: a task may live outside site-packages.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            # A group of its own, so that what a grader starts ends with it.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _reply(self._process)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            await self._kill()
            raise GradingError(f"the grader did not start: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            await self._kill()
            raise
        return self._process

    async def _kill(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        code = await _ended(process)
        self._killed()
        logger.warning("grader killed", extra={"exit_code": code})


async def _ended(process: asyncio.subprocess.Process) -> int:
    # It may have died of a limit a moment ago.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return await process.wait()


async def _asked(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(framed(request))
    await process.stdin.drain()
    return await _reply(process)


async def _reply(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if length > REPLY_BYTES:
        raise ValueError(f"a reply of {length} bytes")
    reply = json.loads(await process.stdout.readexactly(length))
    if not isinstance(reply, dict):
        raise ValueError("a reply that is not an object")
    return reply


def _rewards(reply: dict[str, Any], texts: int) -> list[float]:
    if "error" in reply:
        raise GradingError(f"the grader raised {reply['error']}")
    rewards = reply.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != texts:
        raise GradingError(f"the grader gave {rewards!r:.100} for {texts} completions")
    if not all(isinstance(r, float) and math.isfinite(r) for r in rewards):
        raise GradingError(f"the grader gave a reward that is not finite: {rewards!r:.100}")
    return rewards
