"""A coordinator as a process of its own, and what it logs."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.identity import MadeRun
from support.waiting import WITHIN_S
from support.warm_processes import AsyncProcess, start_warm

SETTINGS = {
    "coordinator.listen": "127.0.0.1:0",
    "coordinator.enrolment_listen": "127.0.0.1:0",
    "coordinator.task": "addition",
    "coordinator.prompts": "100",
    "coordinator.group_size": "2",
    "coordinator.batch_groups": "2",
    "coordinator.max_staleness_versions": "2",
    "coordinator.max_new_tokens": "4",
}


class Coordinator:
    """``heterorl-node --role coordinator`` with both its streams in one file, as journald has them."""

    def __init__(self, process: AsyncProcess | asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if _is_event(line)]

    async def event(self, wanted: str) -> dict[str, Any]:
        """Return the first event of a name, once it is there."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                for event in self.events:
                    if event["event"] == wanted:
                        return event
                await asyncio.sleep(0.02)  # a file tells nobody that it grew

    def plain_text(self) -> list[str]:
        """Return the lines that are no JSON objects."""
        return [line for line in self.lines if not _is_event(line)]


def _is_event(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@asynccontextmanager
async def coordinator(
    made: MadeRun, log: Path, *, open_files: int | None = None
) -> AsyncIterator[Coordinator]:
    """Run a coordinator: forked, with so many ``open_files``; None: started, with as many as this process."""
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    command = ("node", "--role", "coordinator", "--state-dir", str(made.directory), *settings)
    process: AsyncProcess | asyncio.subprocess.Process
    with log.open("ab") as file:
        if open_files is None:  # grpc is imported after the daemon has said how much it may log
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *command, stdout=file, stderr=file, env=environ
            )
        else:
            process = await start_warm(command, file, file, env=os.environ, open_files=open_files)
    try:
        yield Coordinator(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
