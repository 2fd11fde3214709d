"""The run of the ranks' campaign: a learner of several ranks, started and ended together, as by torchrun.

    coordinator <-- learner: rank 0, rank 1 ...
         ^-- sampler-1

No relay and no emulated link: what is killed here is the learner.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

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
        self._server: asyncio.subprocess.Process | None = None
        self._lines: asyncio.Task[None] | None = None
        self._started: asyncio.Queue[int] = asyncio.Queue()
        self._codes: dict[int, asyncio.Future[int]] = {}
        self.pids: Sequence[int] = ()
        """Process ids of the newest incarnation, by rank."""
        self.ended_by_themselves = 0
        """Ranks that noticed that another was gone."""

    async def launch(self, name: str, *, environ: Mapping[str, str], module: str = "node") -> None:
        """Start a daemon; of the learner, all ranks."""
        if name != LEARNER:
            await super().launch(name, environ=environ, module=module)
            return
        if self._server is None:
            await self._open()
        [port], argv = free_ports(1), ["--role", LEARNER, "--config", str(self._directory.config(LEARNER))]
        pids = []
        for rank in range(self.plan.ranks):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.plan.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            log = self.root / "logs" / (f"{LEARNER}.log" if rank == 0 else f"rank-{rank}.log")
            told = {
                "argv": argv,
                "environ": {**os.environ, **ONE_THREAD_EACH, **own, **environ},
                "log": str(log),
            }
            assert self._server is not None
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(told).encode() + b"\n")
            pids.append(await self._started.get())
        self.pids = pids

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
        for rank, pid in enumerate(self.pids):
            if self._codes[pid].done():
                raise ChildError(f"rank {rank} ended with exit code {self._codes[pid].result()}: see its log")

    async def kill_rank(self, rank: int) -> None:
        """Kill one rank; end the others once they noticed, or had the time to."""
        _signal(self.pids[rank], signal.SIGKILL)
        left = [pid for pid in self.pids if pid != self.pids[rank]]
        await self._codes[self.pids[rank]]
        done, late = await asyncio.wait([self._codes[pid] for pid in left], timeout=END_BY_THEMSELVES_S)
        self.ended_by_themselves += len(done)
        for pid in left:
            _signal(pid, signal.SIGKILL)
        if late:
            await asyncio.wait(late)

    async def drain(self) -> dict[str, int]:
        """Stop every process; return exit codes, the learner's as the worst of its ranks'."""
        _signal(self.pids[0], signal.SIGTERM)
        codes = [self._codes[pid] for pid in self.pids]
        _, late = await asyncio.wait(codes, timeout=STOP_S)
        for pid in self.pids if late else ():
            _signal(pid, signal.SIGKILL)
        worst = max([abs(await code) for code in codes])
        await self.close()
        return {LEARNER: worst} | await self._drain_in_order((self.plan.samplers, (COORDINATOR,)))

    async def close(self) -> None:
        """End the server that ranks are forked from, and what is left of them."""
        for pid in self.pids:
            if not self._codes[pid].done():
                _signal(pid, signal.SIGKILL)
        if self._server is not None and self._server.returncode is None:
            self._server.kill()
            await self._server.wait()
        if self._lines is not None:
            self._lines.cancel()

    async def _open(self) -> None:
        repository = Path(__file__).parents[2]
        path = os.pathsep.join(map(str, (repository, repository / "proto")))
        os.environ["PYTHONPATH"] = path
        self._server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.kill_lab.warm_ranks"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | ONE_THREAD_EACH,
            start_new_session=True,
        )
        self._lines = asyncio.create_task(self._read_lines())

    async def _read_lines(self) -> None:
        assert self._server is not None
        assert self._server.stdout is not None
        async for line in self._server.stdout:
            what, pid, *code = line.decode().split()
            if what == "started":
                self._codes[int(pid)] = asyncio.get_running_loop().create_future()
                self._started.put_nowait(int(pid))
            else:
                self._codes[int(pid)].set_result(int(code[0]))


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
