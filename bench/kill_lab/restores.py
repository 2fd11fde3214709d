"""Puts older ledgers under a real run, restarts it in random orders, and looks: it goes on, or says why not.

    run --> backups at random times --> coordinator stopped or killed --> older ledger put back --> restarts
             ^                                                                                        |
             |         goes on <-- newest ledger, or the loss accepted <-- refused aloud -------------+
             '--------------------------------------------------------------- or goes on at once -----'

Whatever happens, no slot may be trained on twice, and a run that stands must say so in its status.
"""

import asyncio
import contextlib
import enum
import shutil
import sqlite3
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.kill_lab.command import Campaign
from bench.kill_lab.stage import Stage
from bench.shared.demo_run import say
from deploy.runs.run_directory import COORDINATOR, LEARNER
from node.commands.status.status_command import fetch_status
from node.coordinator.ledger.ledger_check import examine, facts_in, reading
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.work.terms.model_check import Learner
from node.errors import RefusedError
from node.exit_code import ExitCode
from node.rpc.call_ends import ConnectionLost
from node.values.run import RunStatus

ANSWERS_S: Final = 120.0
"""Longest time in which a run must go on, or say why it does not, once its processes are started."""

STEPS: Final = 8
"""New versions that show that a run goes on: a learner that is refused makes two from its buffer."""

STEPS_BETWEEN: Final = 12
BACKUPS_KEPT: Final = 6
_LOOK_S: Final = 0.25


class Way(enum.StrEnum):
    """How an older ledger comes under the coordinator."""

    BY_HAND = "copied by hand"
    LOST_WAL = "killed, -wal deleted"
    RESTORED = "ledger restore"
    ACCEPTED = "ledger restore --accept-loss"


class Order(enum.StrEnum):
    """Who is restarted, and when."""

    COORDINATOR = "coordinator"
    LEARNER_FIRST = "learner, coordinator"
    COORDINATOR_FIRST = "coordinator, learner"
    TWICE = "coordinator, learner, coordinator"


@dataclass(frozen=True, slots=True)
class Moment:
    """One older ledger and what came of it."""

    way: Way
    order: Order
    steps_behind: int
    gap: str
    """Gap named by the status; empty: the run went on at once."""
    mended_by: str
    answered_s: float
    """From the last restart to an answer."""


class RestoreCampaign(Campaign):
    """One run and its restores."""

    def __init__(self, stage: Stage, *, moments: int) -> None:
        super().__init__(stage)
        self._count = moments
        self._backups: list[Path] = []
        self._made = 0
        self.moments: list[Moment] = []

    @property
    def _ledger(self) -> Path:
        return self._stage.state(COORDINATOR) / FILE_NAME

    async def run(self) -> None:
        """Restore as often as was asked for; then drain the run and judge it."""
        await self._back_up()
        while len(self.moments) < self._count and not self.broken:
            until = self.version + self._draw.randint(1, STEPS_BETWEEN)
            if not await self._reaches(until):
                self.broken.append(f"no step for {ANSWERS_S:.0f} s after version {self.version}")
                break
            await self._back_up()
            await self._reaches(until + self._draw.randint(0, STEPS_BETWEEN))
            await self._moment()
            self._judge_steps()
        exit_codes = await self._stage.drain()
        self.broken += [f"{name} ended with exit code {code}" for name, code in exit_codes.items() if code]
        self.broken += [f"ledger: {problem}" for problem in examine(self._ledger).problems]

    def summary(self) -> dict[str, Any]:
        """Return what there is to say."""
        answers = sorted(moment.answered_s for moment in self.moments)
        return {
            "seed": self._stage.plan.seed,
            "moments": len(self.moments),
            "ways": dict(Counter(moment.way.value for moment in self.moments)),
            "orders": dict(Counter(moment.order.value for moment in self.moments)),
            "refused_aloud": sum(bool(moment.gap) for moment in self.moments),
            "went_on_at_once": sum(not moment.gap for moment in self.moments),
            "mended_by": dict(Counter(moment.mended_by for moment in self.moments if moment.mended_by)),
            "steps_behind": sorted(moment.steps_behind for moment in self.moments),
            "longest_answer_s": round(answers[-1], 1) if answers else 0.0,
            "steps": self.version,
            "groups_trained_on": sum(len(step.groups) for step in self._steps.read()),
            "violations": self.broken,
        }

    async def _moment(self) -> None:
        way, order = self._draw.choice(list(Way)), self._draw.choice(list(Order))
        older = self._draw.choice(self._backups)
        newest = self._stage.root / "newest.sqlite"
        await (self._stage.kill if way is Way.LOST_WAL else self._stage.stop)(COORDINATOR)
        await self._stage.ledger_command("backup", "--to", str(newest))
        known = examine(newest).last_step
        await self._put_back(older, way)
        behind = known - examine(self._ledger).last_step
        if not _knows_a_learner(self._ledger):  # all there ever was stood in the -wal file
            gap, answered_s = await self._refuses_to_start(), 0.0
        else:
            gap, answered_s = await self._answer(await self._restart(order))
        mended_by = ""
        if gap:
            mended_by = self._draw.choice(("newest", "accepted loss"))
            await self._stage.stop(COORDINATOR)
            if mended_by == "newest":
                await self._stage.ledger_command("restore", str(newest))
            else:
                await self._stage.ledger_command("restore", str(self._ledger), "--accept-loss")
            since = self.version
            await self._stage.start(COORDINATOR, environ={})
            still, _ = await self._answer(since)
            if still:
                self.broken.append(f"refused after it was mended ({mended_by}): {still}")
        self.moments.append(Moment(way, order, behind, gap, mended_by, answered_s))
        say(
            f"{len(self.moments)}/{self._count} {way}, {behind} steps behind; restarted {order}: "
            f"{f'{gap}; {mended_by}' if gap else 'goes on'} after {answered_s:.0f} s"
        )

    async def _put_back(self, older: Path, way: Way) -> None:
        match way:
            case Way.BY_HAND:
                await asyncio.to_thread(shutil.copy, older, self._ledger)
            case Way.LOST_WAL:
                self._ledger.with_name(f"{FILE_NAME}-wal").unlink(missing_ok=True)
            case Way.RESTORED:
                await self._stage.ledger_command("restore", str(older))
            case Way.ACCEPTED:
                await self._stage.ledger_command("restore", str(older), "--accept-loss")

    async def _restart(self, order: Order) -> int:
        """Start what was stopped, in this order; return the newest version before the coordinator serves."""
        if order is Order.LEARNER_FIRST:
            await self._stage.kill(LEARNER)
            await self._stage.launch(LEARNER, environ={})
            await asyncio.sleep(self._draw.uniform(0.0, 2.0))
        since = self.version
        await self._stage.start(COORDINATOR, environ={})
        if order in (Order.COORDINATOR_FIRST, Order.TWICE):
            await asyncio.sleep(self._draw.uniform(0.0, 2.0))
            await self._stage.kill(LEARNER)
            await self._stage.launch(LEARNER, environ={})
        if order is Order.TWICE:
            await asyncio.sleep(self._draw.uniform(0.0, 2.0))
            await self._stage.kill(COORDINATOR)
            await self._stage.start(COORDINATOR, environ={})
        return since

    async def _refuses_to_start(self) -> str:
        """Start a coordinator over a ledger that knows of no learner; return why it refuses."""
        config = self._stage.root / "config" / f"{COORDINATOR}.toml"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "node", "--role", COORDINATOR, "--config", str(config)),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(ANSWERS_S):
                _, log = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != ExitCode.COULD_NOT_START:
            self.broken.append(f"a coordinator without a ledger ended with {process.returncode}")
        return next((line for line in log.decode().splitlines() if "knows of no learner" in line), "")

    async def _answer(self, since: int) -> tuple[str, float]:
        """Wait until the run has gone on, or says what is missing; return that, and how long it took."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < ANSWERS_S:
            status = await self._status()
            if status is not None and status.ledger_gap:
                return status.ledger_gap, waited_s
            if self.version >= since + STEPS:
                return "", waited_s
            await asyncio.sleep(_LOOK_S)
        self.broken.append(f"stands still silently at version {self.version} for {ANSWERS_S:.0f} s")
        return "", ANSWERS_S

    async def _reaches(self, version: int) -> bool:
        deadline_s = time.monotonic() + ANSWERS_S
        while self.version < version and time.monotonic() < deadline_s:  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(_LOOK_S)
        return self.version >= version

    async def _status(self) -> RunStatus | None:
        with contextlib.suppress(ConnectionLost, RefusedError):  # while it starts
            return await fetch_status(f"127.0.0.1:{self._stage.ports.members}", self._stage.operator())
        return None

    async def _back_up(self) -> None:
        path = self._stage.root / f"backup-{self._made}.sqlite"
        self._made += 1
        await self._stage.ledger_command("backup", "--to", str(path))
        self._backups.append(path)
        while len(self._backups) > BACKUPS_KEPT:
            self._backups.pop(self._draw.randrange(len(self._backups))).unlink()

    def _judge_steps(self) -> None:
        slots = Counter(group.slot for step in self._steps.read() for group in step.groups)
        doubled = [slot for slot, times in slots.items() if times > 1]
        if doubled:
            self.broken.append(f"{len(doubled)} slots were trained on twice, {doubled[0]} among them")


def _knows_a_learner(ledger: Path) -> bool:
    with reading(ledger) as connection:
        try:
            return next(facts_in(connection, Learner), None) is not None
        except sqlite3.OperationalError:  # even its tables stood in the -wal file
            return False
