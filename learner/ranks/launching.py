"""Starting ranks, and finding out what became of them.

    the daemon       is the first rank, and starts the others on its own host
    torchrun         starts all of them, on any hosts: python -m learner.ranks in place of heterorl-node

A rank other than the first has no gRPC, no state directory and no configuration: the first one tells it.
"""

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from learner.config import RanksConfig
from learner.ranks.environment import LIMIT_S, STORE_PORT
from learner.ranks.errors import RankLostError
from learner.ranks.fates import Child, Neighbour, neighbours
from learner.ranks.instruction_stream import InstructionStream
from learner.ranks.meeting import LOOPBACK, begin, check_world_size, coding_threads, join_ranks
from learner.ranks.rank_group import RankGroup
from node.errors import StartupError
from node.process.abandoned_threads import abandon
from node.process.daemon import SIGNALS

ENDING_S: Final = 2.0
"""For a rank whose connections were closed to have ended."""

END_LIMIT_S: Final = 10.0
"""For ranks to take each of the instructions to end, and then to end; after that they are killed."""


def is_under_torchrun() -> bool:
    """Whether torchrun, or whatever sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Fleet:
    """The ranks of a learner, as the first one has them: told what to do, watched, ended. A service."""

    name = "ranks"
    group: RankGroup
    """All of them, once they have met."""

    def __init__(self, config: RanksConfig) -> None:
        """Start the other ranks, unless torchrun did; ``met`` must follow.

        Raises:
            StartupError: torchrun started another number of processes.
        """
        self._config = config
        self._sizes = config.mesh
        self._store: TCPStore | None = None
        self.children: Sequence[Child] = ()
        """The other ranks, if they were started here."""
        if is_under_torchrun():
            check_world_size(int(os.environ["WORLD_SIZE"]), self._sizes)
        else:
            limit = timedelta(seconds=config.rank_timeout_s)
            self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=limit)
            self.children = self._start(self._store.port)
        self._watched: Sequence[Child | Neighbour] = self.children

    def _start(self, store_port: int) -> Sequence[Child]:
        config, ranks = self._config, self._sizes.ranks
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
        torch.set_num_threads(threads)
        children = []
        for rank in range(1, ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": str(threads),
                STORE_PORT: str(store_port),
                LIMIT_S: str(config.rank_timeout_s),
            }
            command = [sys.executable, "-m", "learner.ranks"]
            # Nothing is ever written to the pipe: its end tells that this process has ended.
            with _deaf_children():
                started = Popen(command, env=environment, stdin=PIPE)
            children.append(Child(rank, started))
        return children

    async def met(self) -> None:
        """Wait until all ranks have met. If one ends before that, or the wait is cancelled, all end.

        Raises:
            StartupError: a rank ended, or did not come in time.
        """
        meeting = _in_thread_of_its_own(self.meet)
        try:
            with self._watching() as lost:
                losing = asyncio.create_task(lost.wait())
                try:
                    first: set[asyncio.Future[Any]] = {meeting, losing}
                    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    losing.cancel()
            if not meeting.done():
                raise StartupError(
                    f"{self.diagnose()}, before all ranks had met",
                    fix="See its log; it was started with the environment of this process.",
                )
        finally:
            if not meeting.done():
                self.kill()
                abandon("meeting of ranks")
        try:
            meeting.result()
        except (dist.DistError, RuntimeError) as error:
            self.kill()
            raise StartupError(
                f"the {self._sizes.ranks} ranks did not meet: {error}",
                fix="Start all, with one configuration; they wait for rank_timeout_s.",
            ) from error

    def meet(self) -> None:
        """Wait for the other ranks, and tell them the configuration. Blocking, for as long as that takes."""
        config = self._config
        join_ranks(self._store, ranks=self._sizes.ranks, limit_s=config.rank_timeout_s)
        self.instructions = InstructionStream(limit_s=config.rank_timeout_s)
        there = neighbours()
        self._watched = self.children or there
        self.instructions.send(begin(config))
        self.group = RankGroup(
            self._sizes,
            device_type=config.device.partition(":")[0],
            instructions=self.instructions,
            diagnose=self.diagnose,
            coding_threads=coding_threads(config),
            offloads=config.offload,
            limit_s=config.rank_timeout_s,
        )

    def diagnose(self) -> str:
        """Return which of this host's ranks ended or are stopped, and how.

        Where none is, wait a moment for one to end: its connections are closed a little earlier.
        """
        if not (fates := self._fates()):
            ending = select.poll()
            with ExitStack() as stack, suppress(ProcessLookupError):
                for one in self._watched:
                    descriptor = os.pidfd_open(one.pid)
                    stack.callback(os.close, descriptor)
                    ending.register(descriptor, select.POLLIN)
                ending.poll(1000 * ENDING_S)
            fates = self._fates()
        return "; ".join(fates)

    def _fates(self) -> list[str]:
        return [fate for one in self._watched if (fate := one.fate)]

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Watch the ranks until ``stopping``, and end them then.

        Raises:
            RankLostError: one ended by itself.
        """
        ready()
        try:
            with self._watching() as lost:
                waits = [asyncio.create_task(event.wait()) for event in (stopping, lost)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
            if stopping.is_set():
                await asyncio.to_thread(self.end)
                return
        except asyncio.CancelledError:
            # A rank is stopped, and a thread here waits for it: only its end ends that.
            self.kill()
            raise
        fates = self.diagnose()
        self.kill()
        raise RankLostError(f"{fates}. All ranks end; start them again: a learner goes on from its journal")

    @contextmanager
    def _watching(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set once a rank that was started here has ended."""
        lost, loop = asyncio.Event(), asyncio.get_running_loop()
        watched = [os.pidfd_open(child.pid) for child in self.children]
        for descriptor in watched:
            loop.add_reader(descriptor, lost.set)
        try:
            yield lost
        finally:
            for descriptor in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def end(self) -> None:
        """Tell the other ranks to end, and wait for those started here."""
        with suppress(RuntimeError):
            self.group.end(limit_s=END_LIMIT_S)
        for child in self.children:
            with suppress(TimeoutExpired):
                child.process.wait(END_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """End the ranks started here that have not ended."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Keep the signals that make this process drain from processes that this thread starts meanwhile.

    A service manager or a terminal sends those to all ranks at once, be it before they have met.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _in_thread_of_its_own(work: Callable[[], None]) -> "asyncio.Future[None]":
    """Start ``work`` in a thread that keeps no process from ending; return what becomes of it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop may be closed by then
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="meeting of ranks", daemon=True).start()
    return future
