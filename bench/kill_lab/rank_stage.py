"""The run of the ranks' campaign: a learner of several ranks, started and ended together, as by torchrun.

    coordinator <-- learner: rank 0, rank 1 ...
         ^-- sampler-1

No relay and no emulated link: what is killed here is the learner.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from bench.forked_context import forked_context
from bench.kill_lab.forked_rank import IMPORTED, become_rank
from bench.kill_lab.plan import Plan
from bench.kill_lab.stage import Stage
from deploy.runs.observation import is_ready
from deploy.runs.processes import ONE_THREAD_EACH, ChildError, Children
from deploy.runs.run_directory import COORDINATOR, LEARNER, free_ports

END_BY_THEMSELVES_S: Final = 3.0
"""For the ranks that are left to notice; then they are killed, as torchrun does after half a minute."""

STOP_S: Final = 60.0
_POLL_S: Final = 0.05


class RankStage(Stage):
    """One run below ``root``, whose learner has ``plan.ranks`` ranks."""

    def __init__(self, plan: Plan, root: Path, *, children: Children) -> None:
        super().__init__(plan, root, children=children)
        os.environ.update(ONE_THREAD_EACH)  # libraries read some of it as they are imported, before the fork
        self._forks = forked_context(*IMPORTED)
        self._ranks: Sequence[BaseProcess] = ()
        """Processes of the newest incarnation."""
        self.ended_by_themselves = 0
        """Ranks that noticed that another was gone."""

    async def launch(self, name: str, *, environ: Mapping[str, str], module: str = "node") -> None:
        """Start a daemon; of the learner, all ranks."""
        if name != LEARNER:
            await super().launch(name, environ=environ, module=module)
            return
        arguments = ["--role", LEARNER, "--config", str(self._directory.config(LEARNER))]
        world = {"WORLD_SIZE": str(self.plan.ranks), "MASTER_ADDR": "127.0.0.1"}
        world |= {"MASTER_PORT": str(free_ports(1)[0])}
        ranks = []
        for rank in range(self.plan.ranks):
            own = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), **environ}
            log = self._directory.log(LEARNER if rank == 0 else f"rank-{rank}")
            ranks.append(self._forks.Process(target=become_rank, args=(arguments, own, log)))
            await asyncio.to_thread(ranks[-1].start)
        self._ranks = ranks

    async def wait_until_ready(self, name: str) -> None:
        """Wait until a daemon serves.

        Raises:
            ChildError: it does not in time, or a rank has ended.
        """
        if name != LEARNER:
            await super().wait_until_ready(name)
            return
        async with asyncio.timeout(self._ready_timeout_s):
            while not await is_ready(self.ports.telemetry[name]):
                self.check()
                await asyncio.sleep(_POLL_S)

    def check(self) -> None:
        """Raise an error if a rank has ended by itself."""
        for rank, process in enumerate(self._ranks):
            if process.exitcode is not None:
                raise ChildError(f"rank {rank} ended with exit code {process.exitcode}: see its log")

    async def kill_rank(self, rank: int) -> None:
        """Kill one rank; end the others once they noticed, or had the time to."""
        self._ranks[rank].kill()
        await _ended([self._ranks[rank]], within_s=STOP_S)
        others = [process for process in self._ranks if process is not self._ranks[rank]]
        self.ended_by_themselves += await _ended(others, within_s=END_BY_THEMSELVES_S)
        await self.close()

    async def drain(self) -> dict[str, int]:
        """Stop every process; return exit codes, the learner's as the worst of its ranks'."""
        self._ranks[0].terminate()
        await _ended(self._ranks, within_s=STOP_S)
        await self.close()
        worst = max(abs(process.exitcode or 0) for process in self._ranks)
        return {LEARNER: worst} | await self._drain_in_order((self.plan.samplers, (COORDINATOR,)))

    async def close(self) -> None:
        """End the ranks that are left."""
        for process in self._ranks:
            process.kill()
        await _ended(self._ranks, within_s=STOP_S)


async def _ended(ranks: Sequence[BaseProcess], *, within_s: float) -> int:
    """Wait for ranks to end; return how many did."""
    await asyncio.gather(*(asyncio.to_thread(process.join, within_s) for process in ranks))
    return sum(process.exitcode is not None for process in ranks)
