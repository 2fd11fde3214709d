"""A process that asks another's telemetry without end, as a supervisor does.

It shares no interpreter with an attack: what it calls late is late for a kubelet too.
"""

import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Answer:
    """One question and what came of it."""

    is_good: bool
    """Status 200 within the time limit."""
    took_s: float


@contextlib.asynccontextmanager
async def probing(port: int, path: str, *, timeout_s: float) -> AsyncIterator[list[Answer]]:
    """Ask ``path`` every ``EVERY_S`` seconds while inside; the list grows by an answer each time."""
    prober = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(port), path, str(timeout_s), stdout=asyncio.subprocess.PIPE
    )
    answers: list[Answer] = []

    async def listen() -> None:
        assert prober.stdout is not None
        while (line := await prober.stdout.readline()).endswith(b"\n"):  # or it was killed while it wrote
            answers.append(Answer(**json.loads(line)))

    listening = asyncio.create_task(listen())
    try:
        yield answers
    finally:
        prober.kill()
        await listening
        await prober.wait()


def _is_good(url: str, *, timeout_s: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except OSError:  # unreachable, too late, or another status
        return False


def _ask_for_ever(port: str, path: str, timeout_s: str) -> None:
    while True:
        asked_s = time.monotonic()
        is_good = _is_good(f"http://127.0.0.1:{port}{path}", timeout_s=float(timeout_s))
        print(json.dumps({"is_good": is_good, "took_s": time.monotonic() - asked_s}), flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    _ask_for_ever(*sys.argv[1:])
