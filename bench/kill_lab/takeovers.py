"""A run of two coordinators on one PostgreSQL database, whose leader is killed or stopped again and again.

    both up --kill -9 or SIGSTOP--> the other serves --> steps are made --> the first starts, stands by --+
       ^                                                                                                  |
       '--------------------------------------------------------------------------------------------------+

A leader that was stopped goes on after the takeover: it must end with exit code 4, and have written nothing.
The kill laboratory's witness looks on; at the end the ledger is copied into a file and held against the run.
"""

import asyncio
import shutil
import signal
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.kill_lab.campaign import Kill, KillCampaign
from bench.kill_lab.plan import RELAY, Plan, configurations
from bench.kill_lab.stage import READY_TIMEOUT_S, Stage
from bench.shared.demo_run import say
from deploy.runs.observation import SCRAPE_TIMEOUT_S, is_ready
from deploy.runs.processes import Children
from deploy.runs.records import differing_groups
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section, role_of
from node.coordinator.ledger.ledger_check import examine
from node.coordinator.ledger.ledger_exchange import back_up_database
from node.exit_code import ExitCode
from node.values.roles import Role

SECOND: Final = "coordinator-2"
_SECOND_ENROLMENT: Final = "coordinator-2-enrolment"
_SECOND_TELEMETRY: Final = "coordinator-2-telemetry"

LONGEST_TAKEOVER_S: Final = 10.0
"""Promised from a leader's end to a coordinator that serves."""

STOPPED_EVERY: Final = 4
"""One leader of so many is stopped (SIGSTOP) in place of killed."""

BEFORE_S: Final = 2.0
"""A kill comes up to this long after the last takeover is over."""

STEPS: Final = 6
"""New versions that show that the run goes on: a learner makes two from its buffer."""

GIVE_UP_S: Final = 120.0
_LOOK_S: Final = 0.02


class TakeoverStage(Stage):
    """A run of the kill laboratory without emulated links, whose peers know two coordinators."""

    def __init__(self, plan: Plan, root: Path, *, children: Children, database: str) -> None:
        others = (SECOND, _SECOND_ENROLMENT, _SECOND_TELEMETRY)
        super().__init__(plan, root, children=children, others=others)
        self.database = database

    @property
    def members_ports(self) -> tuple[int, ...]:
        """Ports of both coordinators."""
        return self.ports.members, self.ports.others[SECOND]

    async def begin(self) -> None:
        """Make the run and bring every process up; the first coordinator leads.

        Raises:
            ChildError: one did not come up.
        """
        self._directory.make_folders()
        await self.make_run(self._documents())
        state, second = self._directory.coordinator_state, self._directory.state(SECOND)
        shutil.copytree(state / Role.COORDINATOR, second / Role.COORDINATOR)
        await self._start_coordinator()
        await self.start(SECOND, environ={})
        await self.start_others()

    async def leader(self) -> str | None:
        """Return which coordinator serves; None: neither."""
        for name in (COORDINATOR, SECOND):
            if await self.serves(name):
                return name
        return None

    async def serves(self, name: str) -> bool:
        """Return whether a coordinator leads."""
        return await is_ready(self._telemetry(name))

    async def wait_until_ready(self, name: str) -> None:
        """Wait until a daemon serves, or, a coordinator, stands by.

        Raises:
            ChildError: it does not in time.
        """
        if role_of(name) != COORDINATOR:
            await super().wait_until_ready(name)
            return
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while await asyncio.to_thread(_phase, self._telemetry(name)) not in ("serving", "standby"):
            if time.monotonic() > deadline_s:
                raise self._children.failure(name, f"neither serves nor stands by after {READY_TIMEOUT_S} s")
            await self._children.wait_for_end(name, timeout_s=_LOOK_S)

    async def are_all_ready(self) -> bool:
        """Return whether every daemon serves now, of the coordinators one."""
        peers = [port for name, port in self.ports.telemetry.items() if name != COORDINATOR]
        return await self.leader() is not None and all([await is_ready(port) for port in peers])

    async def exit_code(self, name: str) -> int | None:
        """Wait for a daemon to end by itself; None: it does not."""
        return await self._children.wait_for_end(name, timeout_s=READY_TIMEOUT_S)

    async def drain(self) -> dict[str, int]:
        """Stop every process, the coordinators last; return exit codes."""
        return await self._drain_in_order(((LEARNER, *self.plan.samplers), (RELAY,), (COORDINATOR, SECOND)))

    def _telemetry(self, name: str) -> int:
        return self.ports.others[_SECOND_TELEMETRY] if name == SECOND else self.ports.telemetry[name]

    def _documents(self) -> dict[str, dict[str, Section]]:
        documents = configurations(self.plan, self._directory, self.ports)
        both = ",".join(f"127.0.0.1:{port}" for port in self.members_ports)
        for name, document in documents.items():
            if name != COORDINATOR:
                document["node"] = {**document["node"], "coordinator": both}
            if name in self.plan.samplers:
                relay = [f"127.0.0.1:{self.ports.others[RELAY]}"]
                document["sampler"] = {**document["sampler"], "weight_sources": relay}
        first = documents[COORDINATOR]
        first["coordinator"] = {**first["coordinator"], "ledger": self.database}
        others = self.ports.others
        documents[SECOND] = {
            **first,
            "node": {**first["node"], "state_dir": str(self._directory.state(SECOND))},
            "telemetry": {**first["telemetry"], "http_listen": f"127.0.0.1:{others[_SECOND_TELEMETRY]}"},
            "coordinator": {
                **first["coordinator"],
                "listen": f"127.0.0.1:{others[SECOND]}",
                "enrolment_listen": f"127.0.0.1:{others[_SECOND_ENROLMENT]}",
            },
        }
        return documents


@dataclass(frozen=True, slots=True)
class Takeover:
    was_stopped: bool
    serves_s: float
    """From the leader's end, or its SIGSTOP, until the other coordinator served."""
    steps_s: float
    """Until the learner had made so many steps."""


class TakeoverCampaign(KillCampaign):
    """Ends the leader as often as was asked for."""

    _stage: TakeoverStage

    def __init__(self, stage: TakeoverStage) -> None:
        super().__init__(stage)
        self.takeovers: list[Takeover] = []

    def summary(self) -> dict[str, Any]:
        """Return what there is to say."""
        serves = [one.serves_s for one in self.takeovers]
        steps = [one.steps_s for one in self.takeovers]
        return super().summary() | {
            "stopped": sum(one.was_stopped for one in self.takeovers),
            "takeover_median_s": round(statistics.median(serves), 2),
            "takeover_worst_s": round(max(serves), 2),
            "goes_on_median_s": round(statistics.median(steps), 2),
            "goes_on_worst_s": round(max(steps), 2),
        }

    async def _kill_one(self) -> None:
        while (leader := await self._stage.leader()) is None:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(self._draw.uniform(0.0, BEFORE_S))
        is_stopped, began_s = len(self.kills) % STOPPED_EVERY == STOPPED_EVERY - 1, time.monotonic()
        if is_stopped:
            self._stage.signal(leader, signal.SIGSTOP)
        else:
            await self._stage.kill(leader)
        version = self.version
        self.kills.append(Kill(leader, "SIGSTOP" if is_stopped else "SIGKILL", True, version))
        other = SECOND if leader == COORDINATOR else COORDINATOR
        if (serves_s := await self._lasts(began_s, lambda: self._stage.serves(other))) > LONGEST_TAKEOVER_S:
            self.broken.append(f"a takeover took {serves_s:.1f} s, promised are {LONGEST_TAKEOVER_S:.0f}")
        steps_s = await self._lasts(began_s, lambda: self._has_made(version + STEPS))
        self.takeovers.append(Takeover(is_stopped, serves_s, steps_s))
        if is_stopped:
            self._stage.signal(leader, signal.SIGCONT)
            if (code := await self._stage.exit_code(leader)) != ExitCode.DEPOSED:
                self.broken.append(f"a leader that was replaced while it was stopped ended with {code}")
        await self._stage.start(leader, environ={})
        say(
            f"{len(self.kills)}/{self._stage.plan.kills} {leader}: {self.kills[-1].instant}; {other} serves "
            f"after {serves_s:.1f} s, {STEPS} steps after {steps_s:.1f} s, version {self.version}"
        )

    async def _has_made(self, version: int) -> bool:
        return self.version >= version

    async def _lasts(self, began_s: float, is_over: Callable[[], Awaitable[bool]]) -> float:
        """Wait until something is over; return how long ago ``began_s`` was then, or GIVE_UP_S."""
        while not await is_over():
            if time.monotonic() - began_s > GIVE_UP_S:
                self.broken.append(f"the run stands still {GIVE_UP_S:.0f} s after kill {len(self.kills)}")
                return GIVE_UP_S
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - began_s

    def _ledger(self) -> Path:
        """Copy the ledger out of the database; hold it against itself and the learner's log."""
        path = self._stage.root / "ledger.sqlite"
        back_up_database(self._stage.database, to=path)
        differing = differing_groups(path, self._stage.state(LEARNER) / "steps.jsonl")
        self.broken += [*examine(path).problems, *differing[:5]]
        return path


def _phase(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=SCRAPE_TIMEOUT_S) as response:
            text: bytes = response.read()
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
    except OSError:  # not there yet
        return ""
    return text.decode().strip()
