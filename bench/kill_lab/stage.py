"""The run of the kill laboratory: a relay and two emulated links beside what every run has."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.kill_lab.plan import (
    HUB_LINK,
    LINK_FLAGS,
    MERGE_LINK,
    MERGES,
    RELAY,
    RELAY_LINK,
    Plan,
    configurations,
)
from deploy.runs.observation import is_ready
from deploy.runs.processes import Children
from deploy.runs.run_directory import COORDINATOR, LEARNER, RunDirectory, role_of
from deploy.runs.run_session import RunSession

READY_TIMEOUT_S: Final = 240.0
"""Several processes that import torch on cores that others use too."""


class Stage(RunSession):
    """One run below ``root``. The caller ends the children that are left."""

    def __init__(self, plan: Plan, root: Path, *, children: Children, others: Sequence[str] = ()) -> None:
        super().__init__(
            RunDirectory(root),
            enrolled=plan.enrolled,
            children=children,
            others=(RELAY, HUB_LINK, RELAY_LINK, MERGES, MERGE_LINK, *others),
            ready_timeout_s=READY_TIMEOUT_S,
        )
        self.plan = plan
        self.root = root
        self.run_id = root.name
        self.model = self._directory.model
        self.run_file = self._directory.run_file

    @property
    def members_ports(self) -> tuple[int, ...]:
        """Ports of the run's coordinators."""
        return (self.ports.members,)

    def state(self, name: str) -> Path:
        """Return where a process keeps what its role writes."""
        return self._directory.state(name) / role_of(name)

    async def begin(self) -> None:
        """Make the run and bring every process up.

        Raises:
            ChildError: one did not come up.
        """
        self._directory.make_folders()
        await self.make_run(configurations(self.plan, self._directory, self.ports))
        for name in self.plan.links:
            await self.start_link(name)
        await self._start_coordinator()
        await self.start_others()

    async def start_link(self, name: str) -> None:
        """Start an emulated link; one that was killed is there again."""
        others = self.ports.others
        target = {HUB_LINK: self.ports.members, RELAY_LINK: others[RELAY], MERGE_LINK: others[MERGES]}[name]
        await self._children.start(
            name,
            *("deploy.demo.link_emulator", *LINK_FLAGS, "--seed", str(self.plan.seed)),
            *("--listen", f"127.0.0.1:{others[name]}", "--target", f"127.0.0.1:{target}"),
            environ={},
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process, which may end of it."""
        self._children.signal(name, number)

    async def are_all_ready(self) -> bool:
        """Return whether every daemon serves now."""
        return all([await is_ready(port) for port in self.ports.telemetry.values()])

    async def stop(self, name: str) -> int:
        """Wait for a daemon to drain; return its exit code."""
        return await self._children.stop(name)

    async def ledger_command(self, verb: str, *arguments: str) -> None:
        """Run ``heterorl-node ledger VERB`` on the coordinator's ledger."""
        state_dir = ("--state-dir", str(self._directory.coordinator_state))
        await self._children.run(f"ledger-{verb}", "node", "ledger", verb, *arguments, *state_dir)

    async def drain(self) -> dict[str, int]:
        """Stop every process, each after those that need it; return exit codes."""
        plan = self.plan
        trains = (plan.contributors, (LEARNER, *plan.samplers))
        return await self._drain_in_order((*trains, (RELAY,), (COORDINATOR,), plan.links))

    async def _drain_in_order(self, order: Sequence[Sequence[str]]) -> dict[str, int]:
        codes: dict[str, int] = {}
        for names in order:
            stopping = [asyncio.create_task(self._children.stop(name)) for name in names]
            codes |= dict(zip(names, await asyncio.gather(*stopping), strict=True))
        return codes

    async def close(self) -> None:
        """End what is not among the children."""

    async def _start_coordinator(self) -> None:
        """Start the first coordinator, let everybody in, and make the model meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.start(COORDINATOR, environ={}))
            tasks.create_task(self._make_model())
            for name in self.plan.enrolled:
                tasks.create_task(self.let_in(name))

    async def _make_model(self) -> None:
        sizes = ("--seed", str(self.plan.seed), "--frames", str(self.plan.frames))
        kind = ("--policy", self.plan.policy)
        await self._children.run("model", "bench.kill_lab.model", str(self.model), *sizes, *kind)
