"""A process that a benchmark measures: started, asked for what it said in its log, weighed, ended."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

SAYS_WITHIN_S: Final = 120.0
_LOOK_S: Final = 0.05


class MeasuredProcess:
    """One process, seen from outside."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._seen = psutil.Process(process.pid)

    def cpu_s(self) -> float:
        """Return the processor time it has taken."""
        times = self._seen.cpu_times()
        return times.user + times.system

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        resident: int = self._seen.memory_info().rss
        return resident

    async def said(self, key: str) -> dict[str, Any]:
        """Wait for an event of its log that has ``key``, and return it.

        Raises:
            RuntimeError: it has ended, or did not say so in time; with its log.
        """
        limit_s = time.monotonic() + SAYS_WITHIN_S
        while True:
            text = await asyncio.to_thread(self._log.read_text)
            for line in text.splitlines():
                if line.startswith("{") and line.endswith("}") and key in (event := json.loads(line)):
                    return dict(event)
            if self._process.returncode is not None or time.monotonic() > limit_s:
                raise RuntimeError(f"a process did not say {key!r}:\n{text}")
            await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def started(arguments: Sequence[str], log: Path) -> AsyncIterator[MeasuredProcess]:
    """Run Python until the body ends; what it prints goes to ``log``."""
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=file, stderr=file)
    try:
        yield MeasuredProcess(process, log)
    finally:
        await ended(process, grace_s=30.0)


async def ended(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    """End a process: SIGTERM, and SIGKILL if it is still there after ``grace_s``."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(grace_s):
            await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
