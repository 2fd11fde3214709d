"""Runs a task's code in a process of its own, which is killed when it takes too long and then restarted.

    (none) --prompt, grade--> started --ready--> idle <--request/reply--> busy
       ^                                                                    | wall limit, died, nonsense
       +-------------------------------- killed ----------------------------+

A request to a process that is killed is not repeated: the caller decides.
"""

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict
from typing import Any, Final

from pydantic import ValidationError

from node.system.waits import put_away
from node.telemetry.printed_lines import PrintedLines
from sampler.process_tree import kill_tree
from sampler.tasks.processes.grader_requests import (
    Request,
    TaskChangedError,
    TaskDescription,
    TaskError,
    TaskUnusableError,
)
from sampler.tasks.processes.grader_worker import PROMPT_CHARACTERS, TRACEBACK_CHARACTERS, framed
from sampler.tasks.task import Outage, TaskSetup

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
"""Longest time for a task to import what it needs; not counted against any group."""

REAP_TIMEOUT_S: Final = 5.0
"""Longest wait for a killed process to be gone. One in an uninterruptible call ends when the call does."""

VARIABLES: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TMP|TEMP|XDG_CACHE_HOME|VIRTUAL_ENV"
    r"|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|PYTHONHASHSEED|PYTHONDONTWRITEBYTECODE|(HF|TRANSFORMERS)_(HOME|CACHE|OFFLINE)|HF_(HUB|DATASETS)_(CACHE|OFFLINE)"
    r"|NLTK_DATA|(OMP|MKL|OPENBLAS)_NUM_THREADS|TOKENIZERS_PARALLELISM|CUDA_VISIBLE_DEVICES"
)
"""Environment variables that a task's process has besides those that its setup names. Options come from the
coordinator and may name a variable to a library, which sends its value somewhere: none of these holds a
secret."""

REPLY_BYTES: Final = 6 * PROMPT_CHARACTERS + 1024
"""A prompt with every character escaped. More means that a grader writes where it should not."""


class Grader:
    """A process that makes the prompts of one task and grades their completions, one request at a time.

    Args:
        wall_limit_s: For one request, from asking to answer.
        cpu_limit_s: For one request; the kernel ends the process after it.
        memory_limit_bytes: Address space of the process.
        killed: Called each time the process was killed or died.
        failed: Called with why attempts to grade failed, and how many.

    Attributes:
        incarnation: How many processes were started; identifies the current one.
        code_digest: Of the code that every process must load; empty: of what the first one loads.
    """

    def __init__(
        self,
        setup: TaskSetup,
        *,
        wall_limit_s: float,
        cpu_limit_s: int,
        memory_limit_bytes: int,
        killed: Callable[[], None],
        failed: Callable[[Outage, int], None] = lambda outage, times: None,
    ) -> None:
        self._setup = framed(asdict(setup))
        self._variables = frozenset(setup.environment)
        self._command = ["sampler.tasks.processes.grader_worker", str(cpu_limit_s), str(memory_limit_bytes)]
        if setup.served_at:
            self._command[:1] = ["sampler.tasks.processes.grader_link", setup.served_at]
        self._wall_limit_s = wall_limit_s
        self._killed = killed
        self._failed = failed
        self._process: asyncio.subprocess.Process | None = None
        self._description: TaskDescription | None = None
        self._busy = asyncio.Lock()
        self._printing: asyncio.Task[None] | None = None
        self._printed = PrintedLines(f"grader of {setup.path}")
        self._asked_for = 0
        self.incarnation = 0
        self.code_digest = b""

    @property
    def is_running(self) -> bool:
        """Whether there is a process; if not, the next request starts one."""
        return self._process is not None

    async def describe(self) -> TaskDescription:
        """Start the process if there is none, and return what the task declares.

        Raises:
            TaskUnusableError: the setup does not make a task.
            TaskChangedError: it loads other code than before; so do the requests that start a process.
            TaskError: the process did not start.
        """
        async with self._busy:
            await self._running()
            assert self._description is not None
            return self._description

    async def ask(
        self, kind: Request, request: Mapping[str, Any], *, incarnation: int | None = None
    ) -> dict[str, Any]:
        """Return the answer to one request; see ``grader_worker`` for both.

        Args:
            incarnation: The process that has to answer; None: any.
        Raises:
            TaskError: the task's code raised, or was killed at a limit; without a fault: what it needs is not
                available, or the process that has to answer has ended.
        """
        async with self._busy:
            if self._process is not None and _has_left(self._process):
                await self._kill()
            if incarnation is not None and (self._process is None or incarnation != self.incarnation):
                raise TaskError("the process that made the prompt has ended", fault=None)
            reply = await self._answer(kind, request)
        outages = reply.get("outages")
        for reason, times in outages.items() if isinstance(outages, dict) else ():
            if reason in set(Outage) and isinstance(times, int):
                self._failed(Outage(reason), times)
        if "bad_row" in reply:
            raise TaskError(f"the row cannot be used: {reply['bad_row']}", fault=kind.failed)
        if "error" in reply:
            shown = str(reply.get("traceback"))[-TRACEBACK_CHARACTERS:]
            fields = {"who": kind.who, "prompt_index": request["index"], "traceback": shown}
            logger.warning("task raised", extra=fields)
            raise kind.error(f"raised {reply['error']}")
        if "unavailable" in reply:
            raise TaskError(f"{kind.who} is unavailable: {reply['unavailable']}", fault=None)
        return reply

    async def close(self) -> None:
        """End the process."""
        async with self._busy:
            if self._process is not None:
                await self._end()

    async def _answer(self, kind: Request, request: Mapping[str, Any]) -> dict[str, Any]:
        process = await self._running()
        self._asked_for += 1
        try:
            async with asyncio.timeout(self._wall_limit_s):
                reply = await _asked(process, framed({**request, "number": self._asked_for}))
            if reply.get("number") != self._asked_for:
                raise ValueError("an answer to something else")
        except TimeoutError:
            await self._kill()
            raise TaskError(
                f"{kind.who} was killed after {self._wall_limit_s} s", fault=kind.timed_out
            ) from None
        except (OSError, EOFError, ValueError) as error:
            is_cpu_limit = await self._kill() == -signal.SIGXCPU
            raise TaskError(
                f"{kind.who} died: {'CPU limit' if is_cpu_limit else type(error).__name__}: {error}",
                fault=kind.timed_out if is_cpu_limit else kind.failed,
            ) from error
        except asyncio.CancelledError:
            # Otherwise its reply would be taken for the next request's.
            await self._kill()
            raise
        return reply

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-B",  # an edit within a second, of the same length, would go unnoticed by cached byte code
            "-m",
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=REPLY_BYTES,
            env=environment(self._variables),
            # A process group of its own, so that what a grader starts ends with it.
            start_new_session=True,
        )
        self.incarnation += 1
        assert self._process.stderr is not None
        self._printing = asyncio.create_task(self._log_printed(self._process.stderr))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await _asked(self._process, self._setup)
            self._description = _described(ready)
            loaded = self._description.code_digest
            self.code_digest = self.code_digest or loaded
            if loaded != self.code_digest:
                raise TaskChangedError(
                    f"the task's code was changed on the disk: digest {loaded.hex()}, "
                    f"loaded before was {self.code_digest.hex()}",
                    fault=None,
                )
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            await self._kill()
            raise TaskError(
                f"the grader did not start: {type(error).__name__}: {error}", fault=None
            ) from error
        except (asyncio.CancelledError, TaskError):
            await self._kill()
            raise
        return self._process

    async def _log_printed(self, printed: asyncio.StreamReader) -> None:
        try:
            while chunk := await printed.read(1 << 16):
                self._printed.feed(chunk)
        finally:
            self._printed.end()

    async def _kill(self) -> int | None:
        code = await self._end()
        self._killed()
        logger.warning("grader killed", extra={"exit_code": code})
        return code

    async def _end(self) -> int | None:
        """End the process with all it started; return its exit code, None if it is not gone yet."""
        assert self._process is not None
        assert self._printing is not None
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        await asyncio.to_thread(kill_tree, process.pid)
        process.stdin.close()
        # Pipes are read to their end: uvloop keeps them open otherwise.
        printing, reading = self._printing, asyncio.create_task(process.stdout.read())
        code = None
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                code = await process.wait()
                await asyncio.wait({printing, reading})
        except TimeoutError:
            logger.error("grader does not end", extra={"pid": process.pid})
        finally:
            await put_away(printing, reading)
        return code


def _described(ready: dict[str, Any]) -> TaskDescription:
    problem = ready.get("unusable")
    if problem is None:
        try:
            return TaskDescription.model_validate(ready)
        except ValidationError as error:
            fault = error.errors()[0]
            problem = f"its attribute {fault['loc'][0]} is {fault['input']!r:.100}: {fault['msg']}"
    raise TaskUnusableError(f"the grader did not start: {problem}", fault=None)


def environment(variables: Container[str]) -> dict[str, str]:
    """Return the environment of a task's process, with ``variables`` besides the usual ones."""
    named = os.environ.items()
    kept = {name: value for name, value in named if name in variables or VARIABLES.fullmatch(name)}
    # The grader can import what this process can: a task may live outside site-packages.
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _has_left(process: asyncio.subprocess.Process) -> bool:
    """Whether an idle process died, or will not hear another request."""
    assert process.stdin is not None
    return process.returncode is not None or process.stdin.is_closing()


async def _asked(process: asyncio.subprocess.Process, request: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdin.is_closing():
        raise BrokenPipeError("it reads no more")  # uvloop raises RuntimeError at a write
    process.stdin.write(request)
    await process.stdin.drain()
    if not (line := await process.stdout.readline()):
        raise EOFError("no reply")
    reply = json.loads(line)
    if not isinstance(reply, dict):
        raise ValueError("a reply that is not a JSON object")
    return reply
