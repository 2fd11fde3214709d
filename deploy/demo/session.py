"""The demo's processes: a run whose second sampler is behind an emulated link."""

import asyncio
from collections.abc import Callable
from typing import Final

from deploy.demo.plan import BASE_ACCURACY, LINK, LINK_FLAGS, SAMPLERS, Plan, configurations
from deploy.runs.observation import scrape
from deploy.runs.processes import Children
from deploy.runs.run_directory import COORDINATOR, RunDirectory
from deploy.runs.run_session import RunSession

_BUSY_LEASES: Final = 4
"""More than a sampler submits between being observed and being killed."""
_BUSY_POLL_S: Final = 0.02
_BUSY_POLLS: Final = 500


class Session(RunSession):
    """One run. The caller ends the children that are left."""

    def __init__(self, plan: Plan, directory: RunDirectory, *, children: Children) -> None:
        super().__init__(directory, enrolled=SAMPLERS, children=children, others=(LINK,))
        self._plan = plan

    async def begin(self, say: Callable[[str], None] = lambda said: None) -> None:
        """Make the run and start every process; ``say`` what happens meanwhile.

        Raises:
            ChildError: one did not start.
        """
        say("making keys, certificates and configurations")
        await self.make_run(configurations(self._plan, self._directory, self.ports))
        listen, target = self.ports.others[LINK], self.ports.members
        await self._children.start(
            LINK,
            *("deploy.demo.link_emulator", *LINK_FLAGS, "--seed", str(self._plan.seed)),
            *("--listen", f"127.0.0.1:{listen}", "--target", f"127.0.0.1:{target}"),
            environ={},
        )
        say("teaching a tiny base model to add, a third of the time right, while the coordinator starts")
        async with asyncio.TaskGroup() as group:
            group.create_task(self.start(COORDINATOR, environ={}))
            group.create_task(self._make_base_model())
            for name in SAMPLERS:
                group.create_task(self.let_in(name))
        say("starting learner and samplers, which load torch and the model")
        await self.start_others()

    async def wait_until_busy(self, name: str) -> None:
        """Wait, within bounds, for a moment at which a sampler holds leases."""
        for _ in range(_BUSY_POLLS):
            metrics = await scrape(self.ports.telemetry[name])
            if metrics is not None and metrics.total("heterorl_sampler_running_leases") >= _BUSY_LEASES:
                return
            await self._children.wait_for_end(name, timeout_s=_BUSY_POLL_S)

    async def drain(self) -> dict[str, int]:
        """Stop every process, the link last; return exit codes by process."""
        return {**await super().drain(), LINK: await self._children.stop(LINK)}

    async def _make_base_model(self) -> None:
        await self._children.run(
            "warm-start",
            *("deploy.demo.warm_start", str(self._directory.model)),
            *("--accuracy", str(BASE_ACCURACY), "--seed", str(self._plan.seed)),
        )
