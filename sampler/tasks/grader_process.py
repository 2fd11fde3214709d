"""Runs a task's code in a process of its own, which is killed when it takes too long and then restarted.

    (none) --prompt, grade--> started --ready--> idle <--request/reply--> busy
       ^                                                                    | wall limit, died, nonsense
       +-------------------------------- killed ----------------------------+

A request to a process that is killed is not repeated: the caller decides.
"""

import asyncio
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from node.failure import Failure
from node.limits import GROUP_METRICS, METRIC_VALUE, REWARD
from sampler.process_tree import kill_tree
from sampler.tasks.grader_outage import Outage
from sampler.tasks.grader_worker import PROMPT_CHARACTERS, TRACEBACK_CHARACTERS, framed
from sampler.tasks.task import CompletionText, Message, TaskSetup

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

MOST_TURNS: Final = 1024
"""Most turns that a task may declare: each is a request of its own, to the engine and to the task."""

REPLY_BYTES: Final = 6 * PROMPT_CHARACTERS + 1024
"""A prompt with every character escaped. More means that a grader writes where it should not."""

PRINTED_BYTES: Final = 64 << 10
"""Most that is passed on to standard error of what a task prints for one request."""


class TaskError(Exception):
    """A task did not deliver a prompt or its rewards; ``fault``: what is wrong with the prompt, if it is."""

    def __init__(self, what: str, *, fault: Failure | None) -> None:
        super().__init__(what)
        self.fault = fault


class TaskUnusableError(TaskError):
    """The class that the task's path names cannot be imported, instantiated or used."""


class TaskChangedError(TaskError):
    """The task's code on the disk is not what it was when the first process loaded it."""


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """A task's own declarations."""

    prompts: int | None
    """None: one for each row of the run's data."""
    is_stateful: bool
    """Whether the process that made a prompt also has to grade it."""
    max_prompt_tokens: int | None
    """Longer prompts are set aside; None: only the model's own limit counts."""
    max_turns: int = 1
    """Turns of a completion at most; 1: the task does not reply."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as tools."""
    code_digest: bytes = b""
    """Digest of the code that was loaded."""


@dataclass(frozen=True, slots=True)
class Grades:
    """A grader's answer about the completions of a group."""

    rewards: list[float]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Name -> a number for each completion, NaN where the grader returned none."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of request, and the faults to report if it fails."""

    who: str
    failed: Failure
    timed_out: Failure


_PROMPT: Final = _Kind("prompt()", Failure.PROMPT_FAILED, Failure.PROMPT_TIMED_OUT)
_REPLY: Final = _Kind("reply()", Failure.GRADING_FAILED, Failure.GRADING_TIMED_OUT)
_GRADE: Final = _Kind("the grader", Failure.GRADING_FAILED, Failure.GRADING_TIMED_OUT)


class Grader:
    """Prompts of one task and rewards for their completions, one request at a time.

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
        self._arguments = (str(cpu_limit_s), str(memory_limit_bytes))
        self._wall_limit_s = wall_limit_s
        self._killed = killed
        self._failed = failed
        self._process: asyncio.subprocess.Process | None = None
        self._description: TaskDescription | None = None
        self._busy = asyncio.Lock()
        self._printing: asyncio.Task[None] | None = None
        self._may_print = 0
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

    async def prompt(self, index: int, row: str = "") -> str | list[Message]:
        """Return a prompt, from one call of the task's ``prompt``.

        Args:
            row: The prompt's row, a JSON object; empty: the run has no data.
        Raises:
            TaskError: the call raised, was killed at a limit, or returned no prompt or too much.
        """
        return _said(await self._ask({"index": index, "row": row}, _PROMPT), _PROMPT)

    async def reply(
        self,
        index: int,
        conversation: Sequence[Message],
        *,
        row: str = "",
        incarnation: int | None = None,
    ) -> str | list[Message] | None:
        """Return what the task says next, from one call of its ``reply``; None: the conversation is over.

        Args:
            conversation: What was said since the prompt.
        Raises:
            TaskError: as for ``prompt`` and ``grade``.
        """
        request = {"index": index, "row": row, "conversation": [dict(message) for message in conversation]}
        reply = await self._ask(request, _REPLY, incarnation=incarnation)
        return None if reply.get("is_over") else _said(reply, _REPLY)

    async def grade(
        self,
        index: int,
        completions: Sequence[CompletionText],
        *,
        row: str = "",
        incarnation: int | None = None,
    ) -> Grades:
        """Return one finite reward per completion, and what else the grader measured.

        Args:
            incarnation: The process that has to do it; None: any.
        Raises:
            TaskError: the grader raised, was killed at a limit, or returned something else; without a fault:
                what it needs is not available, or the process that has to do it has ended.
        """
        request = {
            "index": index,
            "row": row,
            "completions": [
                (c.text, c.tokens, c.finish, *([c.conversation] if c.conversation else []))
                for c in completions
            ],
        }
        reply = await self._ask(request, _GRADE, incarnation=incarnation)
        return Grades(_rewards(reply, len(completions)), _metrics(reply, len(completions)))

    async def close(self) -> None:
        """End the process."""
        async with self._busy:
            if self._process is not None:
                await self._end()

    async def _ask(
        self, request: dict[str, Any], kind: _Kind, *, incarnation: int | None = None
    ) -> dict[str, Any]:
        async with self._busy:
            if self._process is not None and _has_left(self._process):
                await self._kill()
            if incarnation is not None and (self._process is None or incarnation != self.incarnation):
                raise TaskError("the process that made the prompt has ended", fault=None)
            process = await self._running()
            self._may_print = PRINTED_BYTES
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
            self._count(reply.get("outages"))
            if "error" in reply:
                shown = str(reply.get("traceback"))[-TRACEBACK_CHARACTERS:]
                fields = {"who": kind.who, "prompt_index": request["index"], "traceback": shown}
                logger.warning("task raised", extra=fields)
                raise TaskError(f"{kind.who} raised {reply['error']}", fault=kind.failed)
            if "unavailable" in reply:
                raise TaskError(f"{kind.who} is unavailable: {reply['unavailable']}", fault=None)
            return reply

    def _count(self, outages: Any) -> None:
        if isinstance(outages, dict):
            for reason, times in outages.items():
                if reason in set(Outage) and isinstance(times, int):
                    self._failed(Outage(reason), times)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-B",  # an edit within a second, of the same length, would go unnoticed by cached byte code
            "-m",
            "sampler.tasks.grader_worker",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=REPLY_BYTES,
            env=environment(self._variables),
            # A process group of its own, so that what a grader starts ends with it.
            start_new_session=True,
        )
        self.incarnation += 1
        self._may_print = PRINTED_BYTES
        assert self._process.stderr is not None
        self._printing = asyncio.create_task(self._pass_on(self._process.stderr))
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

    async def _pass_on(self, printed: asyncio.StreamReader) -> None:
        while chunk := await printed.read(1 << 20):
            if self._may_print > 0:
                sys.stderr.write(chunk[: self._may_print].decode(errors="replace"))
                if len(chunk) > self._may_print:
                    logger.warning("task prints too much", extra={"limit_bytes": PRINTED_BYTES})
            self._may_print -= len(chunk)

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
        pipes = {self._printing, asyncio.create_task(process.stdout.read())}
        code = None
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                code = await process.wait()
                await asyncio.wait(pipes)
        except TimeoutError:
            logger.error("grader does not end", extra={"pid": process.pid})
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.wait(pipes)
        return code


def _described(ready: dict[str, Any]) -> TaskDescription:
    declared = {"max_turns": 1, **ready}
    problem = ready.get("unusable")
    for name, most in (("prompts", None), ("max_prompt_tokens", None), ("max_turns", MOST_TURNS)):
        value = declared.get(name)
        if problem or (value is None and name != "max_turns"):
            continue
        if not isinstance(value, int) or value < 1 or (most is not None and value > most):
            bounds = "at least 1" if most is None else f"1 to {most}"
            problem = f"its attribute {name} is {value!r:.100}, not a number of {bounds}"
    if problem:
        raise TaskUnusableError(f"the grader did not start: {problem}", fault=None)
    return TaskDescription(
        ready.get("prompts"),
        bool(ready.get("is_stateful")),
        ready.get("max_prompt_tokens"),
        declared["max_turns"],
        ready.get("template_arguments", {}),
        bytes.fromhex(ready.get("code_digest", "")),
    )


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


def _said(reply: dict[str, Any], kind: _Kind) -> str | list[Message]:
    if "too_long" in reply:
        raise TaskError(
            f"{kind.who} returned {reply['too_long']} characters; at most {PROMPT_CHARACTERS} are allowed",
            fault=Failure.PROMPT_TOO_LONG if kind is _PROMPT else kind.failed,
        )
    if isinstance(messages := reply.get("messages"), list):
        return messages
    if not isinstance(text := reply.get("text"), str):
        raise TaskError(f"{kind.who} {reply.get('odd', 'returned no text')}", fault=kind.failed)
    return text


def _wrong(what: str) -> TaskError:
    return TaskError(f"the grader returned {what}", fault=Failure.GRADING_FAILED)


def _rewards(reply: dict[str, Any], texts: int) -> list[float]:
    rewards = reply.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != texts:
        raise _wrong(f"{rewards!r:.100} for {texts} completions")
    if not all(_is_number(reward, REWARD) for reward in rewards):
        raise _wrong(f"a reward that is not finite, or beyond {REWARD:g}: {rewards!r:.100}")
    return rewards


def _is_number(value: Any, largest: float) -> bool:
    return isinstance(value, float) and abs(value) <= largest


def _metrics(reply: dict[str, Any], completions: int) -> dict[str, list[float]]:
    columns = reply.get("metrics")
    if not isinstance(columns, dict) or len(columns) > GROUP_METRICS:
        raise _wrong(f"metrics {columns!r:.100}")
    return {name: _column(name, values, completions) for name, values in columns.items()}


def _column(name: str, values: Any, completions: int) -> list[float]:
    if isinstance(values, list) and len(values) == completions:
        column = [math.nan if value is None else value for value in values]
        if all(value is None or _is_number(value, METRIC_VALUE) for value in values):
            return column
    raise _wrong(f"{values!r:.100} for metric {name}")
