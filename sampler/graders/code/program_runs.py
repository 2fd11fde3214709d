"""Runs the programs of a group against their row's tests, each in sandboxes of its own.

    stdin:    program <-- input, --> output, for each test; compared here
    asserts:  program <-- calls, --> values -- tests, in a second sandbox --> verdict

Neither what is expected nor what decides is ever where the program runs: it can fail, and cannot pretend.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from node.grading.completion import GraderOutageError, Outage
from node.system.waits import drop
from sampler.graders.code.assertions import Assertions, assertions
from sampler.graders.code.code_options import CodeOptions
from sampler.graders.code.inside.shared import BEGUN
from sampler.graders.code.inside.tests_host import BROKEN, GONE, PASSED
from sampler.graders.code.program_tests import Exchange, asserts_of, exchanges_of, text_of
from sampler.graders.code.sandbox import Sandbox, memory_file

START_S: Final = 1.0
"""Time for a sandbox and its Python to start: 0.2 to 0.4 s on two cores with a load of 20."""

PACE: Final = 2.0
"""Wall time that a program gets for a second of CPU time: it may have to share a core."""

GRACE_S: Final = 2.0
"""For the tests to note that their program has ended."""

OUTPUT_BYTES: Final = 1 << 20
"""Longest output. A program that writes more is ended."""

_BLOCK: Final = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)

_OVER_TIME: Final = {-signal.SIGKILL, 128 + signal.SIGKILL, 128 + signal.SIGXCPU}


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program's tests."""

    passed: int
    tests: int
    timed_out: bool = False
    crashed: bool = False
    """It ended with an error or before it was asked to, or wrote too much."""


def completion_limit_s(options: CodeOptions) -> float:
    """Return the longest time for one completion."""
    runs = options.most_tests if options.tests == "stdin" else 1
    return PACE * options.time_limit_s + START_S * runs + GRACE_S


class ProgramRuns:
    """Verdicts on programs, of which ``at_once`` run side by side."""

    def __init__(self, options: CodeOptions, sandbox: Sandbox, *, at_once: int) -> None:
        self._options = options
        self._sandbox = sandbox
        self._at_once = at_once
        self._limits = (str(options.time_limit_s), str(options.memory_limit_bytes))

    def verdicts(self, row: Mapping[str, Any], tests: Any, completions: Sequence[str]) -> list[ProgramResult]:
        """Return the verdict on each completion; ValueError if the row has no tests."""
        return asyncio.run(self._group(row, tests, completions))

    async def _group(
        self, row: Mapping[str, Any], tests: Any, completions: Sequence[str]
    ) -> list[ProgramResult]:
        prefix = text_of(row, self._options.prefix)
        programs = [program_of(text, prefix).encode(errors="replace") for text in completions]
        places = asyncio.Semaphore(self._at_once)
        run: Callable[[bytes], Awaitable[ProgramResult]]
        if self._options.tests == "stdin":
            run = partial(self._exchanged, exchanges_of(tests, self._options.most_tests))
        else:
            run = partial(self._asserted, self._assertions(row, tests, prefix))

        async def verdict(program: bytes) -> ProgramResult:
            async with places:
                return await run(program)

        # All are waited for, whatever becomes of one: a start that is cancelled may hang asyncio.
        found = await asyncio.gather(*map(verdict, programs), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, ProgramResult)]

    def _assertions(self, row: Mapping[str, Any], tests: Any, prefix: str) -> Assertions:
        entry = text_of(row, self._options.entry_point)
        if entry and not entry.isidentifier():
            raise ValueError(f"the entry point {entry!r:.100} is no name")
        setup = text_of(row, self._options.setup)
        return assertions(asserts_of(tests), setup=setup, prefix=prefix, entry=entry)

    async def _start(
        self, host: str, program: bytes, *, stdin: int, stdout: int
    ) -> asyncio.subprocess.Process:
        files = {"program.py": program}
        return await self._sandbox.start(host, *self._limits, files=files, stdin=stdin, stdout=stdout)

    async def _exchanged(self, exchanges: Sequence[Exchange], program: bytes) -> ProgramResult:
        deadline_s = asyncio.get_running_loop().time() + completion_limit_s(self._options) - GRACE_S
        passed = 0
        crashed = False
        for exchange in exchanges:
            given = exchange.input.encode(errors="replace")
            code, output = await self._run(program, given, deadline_s=deadline_s)
            if code in _OVER_TIME:
                # Another run would be as slow.
                return ProgramResult(passed, len(exchanges), timed_out=True, crashed=crashed)
            crashed = crashed or code != 0
            passed += code == 0 and exchange.accepts(output.decode(errors="replace"))
        return ProgramResult(passed, len(exchanges), crashed=crashed)

    async def _run(self, program: bytes, given: bytes, *, deadline_s: float) -> tuple[int | None, bytes]:
        """Return exit code and output; no code: it was ended for writing too much."""
        source = memory_file(given)
        try:
            process = await self._start("script_host", program, stdin=source, stdout=asyncio.subprocess.PIPE)
        finally:
            os.close(source)
        assert process.stdout is not None
        try:
            async with asyncio.timeout_at(deadline_s):
                output = await _start_of(process.stdout)
                # Whatever else holds its output is in the sandbox, and ends with it.
                code = await process.wait() if output is not None else None
        except TimeoutError:
            output, code = b"", -signal.SIGKILL
        finally:
            await end(process)
        await _check_begun(process)
        return code, output or b""

    async def _asserted(self, tests: Assertions, program: bytes) -> ProgramResult:
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        try:
            running = await self._start("function_host", program, stdin=requests_out, stdout=replies_in)
            try:
                judging = await self._sandbox.start(
                    "tests_host",
                    *self._limits,
                    files={"tests": tests.compiled},
                    stdin=replies_out,
                    stdout=requests_in,
                )
            except BaseException:
                await end(running)
                raise
        finally:
            for descriptor in (requests_out, requests_in, replies_out, replies_in):
                os.close(descriptor)
        return await self._judged(tests.count, running, judging)

    async def _judged(
        self, tests: int, running: asyncio.subprocess.Process, judging: asyncio.subprocess.Process
    ) -> ProgramResult:
        limit_s = completion_limit_s(self._options) - GRACE_S
        assert judging.stderr is not None
        reading = asyncio.create_task(_start_of(judging.stderr))
        try:
            await asyncio.wait({reading}, timeout=limit_s)
            is_late = not reading.done()
            if is_late:
                _kill(running)
                await asyncio.wait({reading}, timeout=GRACE_S)
            else:
                with contextlib.suppress(TimeoutError):  # of its requests there are no more
                    await asyncio.wait_for(running.wait(), GRACE_S)
            is_over_time = is_late or running.returncode in _OVER_TIME
        except BaseException:
            drop(reading)
            raise
        finally:
            await end(running)
            await end(judging)
        said = await reading or b""
        await _check_begun(running)
        if not said.startswith(BEGUN):
            raise GraderOutageError(Outage.NOT_STARTED, said.decode(errors="replace").strip()[-300:])
        marks = said.removeprefix(BEGUN)
        if marks.startswith(BROKEN):
            raise ValueError(f"the tests cannot be used: {marks[1:].decode(errors='replace'):.500}")
        is_gone = marks.endswith(GONE)
        return ProgramResult(
            marks.count(PASSED), tests, timed_out=is_over_time, crashed=is_gone and not is_over_time
        )


async def _start_of(stream: asyncio.StreamReader) -> bytes | None:
    """Return all that a stream holds; None if that is too much."""
    found = bytearray()
    while chunk := await stream.read(1 << 16):
        found += chunk
        if len(found) > OUTPUT_BYTES:
            return None
    return bytes(found)


async def end(process: asyncio.subprocess.Process) -> None:
    """End a sandbox with all in it."""
    if process.returncode is None:
        _kill(process)
    if process.stdout is not None:
        # Or asyncio waits for ever for the end of a stream that nobody reads.
        while await process.stdout.read(1 << 16):
            pass
    await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    # Process.kill would take the exit code of one that has just ended away from asyncio.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _check_begun(process: asyncio.subprocess.Process) -> None:
    """Raise if the sandbox did not start; a program that failed in it is another matter."""
    assert process.stderr is not None
    said = await _start_of(process.stderr) or b""
    if not said.startswith(BEGUN):
        raise GraderOutageError(
            Outage.NOT_STARTED, said.decode(errors="replace").strip()[-300:] or "ended before it began"
        )


def program_of(text: str, prefix: str) -> str:
    """Return the last fenced block, or all of a text that has none; ``prefix`` is what it continues."""
    if blocks := _BLOCK.findall(text):
        return f"{prefix}\n{blocks[-1]}" if prefix else str(blocks[-1])
    return prefix + text
