"""Starting ranks, and finding out what became of them.

    the daemon       is the first rank, and starts the others on its own host
    torchrun         starts all of them, on any hosts: python -m learner.ranks in place of heterorl-node

A rank other than the first has no gRPC, no state directory and no configuration: the first one tells it.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from learner.config import LearnerConfig
from learner.ranks.errors import RankLostError
from learner.ranks.mesh_sizes import MeshSizes
from learner.ranks.orders import Order, OrderStream
from learner.ranks.rank_group import RankGroup
from learner.ranks.shard_words import ShardWords
from learner.training.model import Policy
from node.errors import StartupError

LOOPBACK: Final = "127.0.0.1"

_STORE_PORT: Final = "HETERORL_RANK_STORE_PORT"
_LIMIT_S: Final = "HETERORL_RANK_TIMEOUT_S"
"""Variables of the ranks that a daemon starts."""

END_LIMIT_S: Final = 10.0
"""For ranks to end after they were told; then they are killed."""


def mesh_sizes(config: LearnerConfig) -> MeshSizes:
    """Return the mesh that a configuration asks for."""
    return MeshSizes(config.dp_replicate, config.dp_shard, config.tp, config.pp)


def is_under_torchrun() -> bool:
    """Whether torchrun, or whatever sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True, slots=True)
class Child:
    """A rank that this process started."""

    rank: int
    process: subprocess.Popen[bytes]

    @property
    def fate(self) -> str:
        """Why it does not answer, in words; empty while it runs."""
        code = self.process.poll()
        who = f"rank {self.rank} (process {self.process.pid})"
        if code is None:
            is_stopped = _state(self.process.pid) in ("T", "t")
            return f"{who} is stopped: continue it with kill -CONT" if is_stopped else ""
        if code == -signal.SIGKILL:
            return f"{who} was killed, by a person or for want of memory: see dmesg"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}, see its log"
        return f"{who} ended {how}"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A rank of this host that torchrun started."""

    rank: int
    pid: int

    @property
    def fate(self) -> str:
        """As ``Child.fate``."""
        who = f"rank {self.rank} (process {self.pid})"
        state = _state(self.pid)
        if state in ("", "Z", "X"):
            return f"{who} ended: see its log, and dmesg if that says nothing"
        return f"{who} is stopped: continue it with kill -CONT" if state in ("T", "t") else ""


def neighbours(orders: OrderStream) -> list[Neighbour]:
    """Tell all ranks this one's process, and return those of its host; every rank calls this."""
    told = torch.tensor([_place(), os.getpid()])
    every = [torch.zeros_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(every, told, group=orders.group)
    return [
        Neighbour(rank, int(pid))
        for rank, (place, pid) in enumerate(every)
        if int(place) == _place() and int(pid) != os.getpid()
    ]


def _place() -> int:
    """Return a number of this host's processes: containers count theirs by themselves."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Fleet:
    """The ranks of a learner, as the first one has them: told what to do, watched, ended. A service."""

    name = "ranks"

    def __init__(self, config: LearnerConfig) -> None:
        """Start the other ranks, unless torchrun did, and meet them.

        Raises:
            StartupError: torchrun started another number of processes; a rank did not come.
        """
        sizes = mesh_sizes(config)
        self.children: Sequence[Child] = ()
        """The other ranks, if they were started here."""
        if is_under_torchrun():
            check_world_size(int(os.environ["WORLD_SIZE"]), sizes)
            join_ranks(limit_s=config.rank_timeout_s)
        else:
            self.children = self._start(sizes, config)
        self.orders = OrderStream(limit_s=config.rank_timeout_s)
        there = neighbours(self.orders)
        self._watched: Sequence[Child | Neighbour] = self.children or there
        self.orders.send(Order("begin", {"config": _as_json(config)}))
        device_type = config.device.partition(":")[0]
        self.group = RankGroup(
            sizes,
            device_type=device_type,
            orders=self.orders,
            diagnose=self.diagnose,
            offloads=config.offload,
            limit_s=config.rank_timeout_s,
        )
        self._words: ShardWords | None = None

    def _start(self, sizes: MeshSizes, config: LearnerConfig) -> Sequence[Child]:
        limit = timedelta(seconds=config.rank_timeout_s)
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=limit)
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // sizes.ranks)
        torch.set_num_threads(threads)
        children = []
        for rank in range(1, sizes.ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(sizes.ranks),
                "OMP_NUM_THREADS": str(threads),
                _STORE_PORT: str(store.port),
                _LIMIT_S: str(config.rank_timeout_s),
            }
            command = [sys.executable, "-m", "learner.ranks"]
            children.append(Child(rank, subprocess.Popen(command, env=environment)))
        dist.init_process_group(_backends(), store=store, rank=0, world_size=sizes.ranks, timeout=limit)
        return children

    def diagnose(self) -> str:
        """Return which of this host's ranks ended or are stopped, and how."""
        return "; ".join(fate for one in self._watched if (fate := one.fate))

    def leads(self, policy: Policy) -> None:
        """Take over ending the exchanges of this policy."""
        assert isinstance(policy.master_words, ShardWords)
        self._words = policy.master_words

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Watch the ranks until ``stopping``, and end them then.

        Raises:
            RankLostError: one ended by itself.
        """
        ready()
        lost = asyncio.Event()
        loop = asyncio.get_running_loop()
        watched = [os.pidfd_open(child.process.pid) for child in self.children]
        for descriptor in watched:
            loop.add_reader(descriptor, lost.set)
        waits = [asyncio.create_task(event.wait()) for event in (stopping, lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            for descriptor in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        if lost.is_set() and not stopping.is_set():
            self.kill()
            raise RankLostError(
                f"{self.diagnose()}. All ranks end; start the learner again, and it goes on from its journal"
            )
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Tell the other ranks to end, and wait for those started here."""
        with suppress(RuntimeError):
            if self._words is not None:
                self._words.end()
            self.group.saves.send(Order("end", {}))
            self.orders.send(Order("end", {}))
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(END_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """End the ranks started here that have not ended."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()


def check_world_size(processes: int, sizes: MeshSizes) -> None:
    """Check that torchrun started as many processes as the mesh has ranks.

    Raises:
        StartupError: it did not.
    """
    if processes != sizes.ranks:
        raise StartupError(
            f"torchrun started {processes} processes, the mesh ({sizes}) has {sizes.ranks} ranks",
            fix=f"Start {sizes.ranks}, or change learner.pp, dp_replicate, dp_shard and tp.",
        )


def join_ranks(*, limit_s: float | None = None) -> None:
    """Meet the other ranks where the environment says: at the daemon that started this one, or torchrun's."""
    limit = timedelta(seconds=limit_s or float(os.environ.get(_LIMIT_S, "600")))
    if (port := os.environ.get(_STORE_PORT)) is None:
        dist.init_process_group(_backends(), timeout=limit)
        return
    store = TCPStore(LOOPBACK, int(port), wait_for_workers=False, timeout=limit)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(_backends(), store=store, rank=rank, world_size=ranks, timeout=limit)


def _as_json(config: LearnerConfig) -> dict[str, object]:
    values: dict[str, object] = json.loads(json.dumps(config.model_dump(), default=str))
    return values


def config_of(order: Order) -> LearnerConfig:
    """Return the configuration that the first rank tells."""
    return LearnerConfig.model_validate(order.values["config"])


def _backends() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _state(pid: int) -> str:
    """Return the letter that the kernel has for what a process does; empty if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
