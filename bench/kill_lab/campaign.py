"""Kills one process after the other, and holds the run against its promises at the end."""

import asyncio
import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from bench.kill_lab.command import Campaign
from bench.kill_lab.instants import ANY_TIME, INSTANTS, STARTING, Instant, choose, wait_for
from bench.kill_lab.noise import disturb_moments
from bench.kill_lab.stage import Stage
from bench.kill_lab.witness import Witness, lost_groups
from bench.shared.demo_run import say
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, role_of
from node.commands.status.status_command import fetch_status
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost

INSTANT_TIMEOUT_S: Final = 8.0
"""A moment that does not come by then was not to come; the kill takes place all the same."""

ANY_TIME_S: Final = 2.0
STARTING_S: Final = 5.0
DISTURBED_SHARE: Final = 0.25
"""Share of the learner's kills after which the steps it takes again are made to come out otherwise."""

GOES_ON_S: Final = 60.0
"""Longest wait for the next version after a kill, once everybody serves."""

_LOOK_S: Final = 0.25
_MOVES_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that was killed."""

    name: str
    instant: str
    has_come: bool
    """Whether the moment came; else it was any time."""
    version: int
    """Newest step then."""


class KillCampaign(Campaign):
    """One run and its kills."""

    _instants: ClassVar[Mapping[str, Sequence[Instant]]] = INSTANTS
    _witness_of = Witness.of

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._witness = type(self)._witness_of(stage)
        self.kills: list[Kill] = []
        self.disturbed = 0
        """Kills of the learner after which its checkpoint's moments were changed."""

    async def run(self) -> None:
        """Kill as often as was asked for; then let the run make one more version, and drain it."""
        looking = asyncio.create_task(self._look_for_ever())
        try:
            for _ in range(self._stage.plan.kills):
                await self._kill_one()
            await self._goes_on()
            for name in self._stage.plan.daemons:
                await self._stage.wait_until_ready(name)
            exit_codes = await self._stage.drain()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        await asyncio.to_thread(self._witness.conclude)
        self._judge(exit_codes)

    def summary(self) -> dict[str, Any]:
        """Return what there is to say."""
        return {
            "seed": self._stage.plan.seed,
            "kills": len(self.kills),
            "killed": dict(Counter(role_of(kill.name) for kill in self.kills)),
            "instants": dict(
                sorted(Counter(f"{role_of(kill.name)}: {self._instant(kill)}" for kill in self.kills).items())
            ),
            "steps": self.version,
            "versions_signed": self._witness.versions,
            "compared": asdict(self._witness.looked),
            "groups_acknowledged": len(self._witness.acknowledged),
            "replays": asdict(self._witness.replays) | {"disturbed": self.disturbed},
            "violations": self._witness.violations + self.broken,
        }

    def _instant(self, kill: Kill) -> str:
        return kill.instant if kill.has_come else ANY_TIME.name

    async def _kill_one(self) -> None:
        role = self._draw.choice(self._stage.plan.roles)
        name = self._draw.choice([name for name in self._stage.plan.daemons if role_of(name) == role])
        instant = choose(self._instants[role], self._draw)
        if instant is STARTING and self.kills:
            name = self.kills[-1].name
            await asyncio.sleep(self._draw.uniform(0.0, STARTING_S))
            has_come = True
        else:
            await self._goes_on()
            await self._stage.wait_until_ready(name)
            has_come = await self._wait_for(instant, name)
            await asyncio.sleep(self._draw.uniform(0.0, instant.after_s))
        await self._stage.kill(name)
        self.kills.append(Kill(name, instant.name, has_come, self.version))
        await asyncio.to_thread(self._witness.examine, name)
        if role == "learner" and self._draw.random() < DISTURBED_SHARE:
            await asyncio.to_thread(self._disturb)
        await self._stage.launch(name, environ={})
        note = "" if has_come else " (which did not come)"
        say(f"{len(self.kills)}/{self._stage.plan.kills} {name}: {instant.name}{note}, step {self.version}")

    def _disturb(self) -> bool:
        """Make the replay inexact, as it may be on a GPU; return False if there is no checkpoint."""
        checkpoints = sorted((self._stage.state(LEARNER) / "checkpoints").glob("0*"))
        if checkpoints:
            disturb_moments(checkpoints[-1])
            self.disturbed += 1
        return bool(checkpoints)

    async def _wait_for(self, instant: Instant, name: str) -> bool:
        if not instant.pattern:
            await asyncio.sleep(self._draw.uniform(0.0, ANY_TIME_S))
            return instant is ANY_TIME
        state = self._stage.state(name)
        return await asyncio.to_thread(wait_for, instant, state, name=name, timeout_s=INSTANT_TIMEOUT_S)

    async def _goes_on(self) -> None:
        """Wait for a version newer than that of the last kill."""
        since = self.kills[-1].version if self.kills else 0
        deadline_s = time.monotonic() + GOES_ON_S
        while self.version <= since:
            if time.monotonic() > deadline_s:
                if await self._stage.are_all_ready():
                    self.broken.append(f"no step for {GOES_ON_S:.0f} s after version {since}")
                    return
                deadline_s = time.monotonic() + GOES_ON_S
            await asyncio.sleep(_MOVES_S)

    async def _look_for_ever(self) -> None:
        operator = self._stage.operator()
        while True:
            await asyncio.to_thread(self._witness.look)
            for port in self._stage.members_ports:
                with contextlib.suppress(ConnectionLost, RefusedError):  # while it drains or stands by
                    self._witness.hear(await fetch_status(f"127.0.0.1:{port}", operator))
            await asyncio.sleep(_LOOK_S)

    def _ledger(self) -> Path:
        """Return the ledger of the coordinator, which has ended."""
        return self._stage.state(COORDINATOR) / "ledger.sqlite"

    def _judge(self, exit_codes: dict[str, int]) -> None:
        ledger_path = self._ledger()
        promises = promises_of_any_run(
            versions=self.version,
            steps=self._steps.read(),
            ledger=read_ledger(ledger_path, run_id=self._stage.run_id),
            exit_codes=exit_codes,
        )
        self.broken += [f"{check.promise}: {check.figures}" for check in promises if not check.is_kept]
        lost = lost_groups(self._witness.acknowledged, _groups_arrived(ledger_path))
        if lost:
            self.broken.append(f"{len(lost)} groups were taken in and lost, {lost[0]} among them")


def _groups_arrived(ledger: Path) -> list[str]:
    """Return the attempts that the ledger knows to have arrived, and those of slots that another one won."""
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT number, attempts, winner FROM slots").fetchall()
    return [
        f"{slot}.{number}"
        for slot, attempts, winner in rows
        for number, _, is_submitted, *_ in json.loads(attempts)
        if is_submitted or winner
    ]
