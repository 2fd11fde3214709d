"""The coordinator as one service: its servers, its upkeep, and the ledger that outlives both."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from node.clock import Clock
from node.coordinator.live_status import LiveStatus
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peer_table import PeerTable
from node.coordinator.peers import Peers
from node.coordinator.published import Published
from node.coordinator.reward_checking import RewardChecking
from node.coordinator.spool import Spool
from node.coordinator.trust_upkeep import TrustUpkeep
from node.errors import RefusedError
from node.process.memory import GIVE_BACK_EVERY_S, give_back
from node.rpc.server import RpcServer
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket_mirror import BucketMirror

logger = logging.getLogger(__name__)

UPKEEP_S: Final = 1.0
"""How late an expiry, a silence or a metric may be noticed; far below any of their terms."""


@dataclass(slots=True)
class CoordinatorService:
    """Serves until stopped; the ledger is closed when nobody can ask for it any more."""

    spool: Spool
    peers: Peers
    table: PeerTable
    store: ArtifactStore
    bucket: BucketMirror | None
    published: Published
    trust: TrustUpkeep
    checking: RewardChecking
    live: LiveStatus
    servers: Sequence[RpcServer]
    """The members' and, unless TLS is off, the enrolment's."""
    metrics: CoordinatorMetrics
    clock: Clock
    name: str = "coordinator"
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _gave_back_at_s: float = float("-inf")

    @property
    def address(self) -> str:
        """Where members connect, host:port; the real port once ready."""
        return self.servers[0].address

    @property
    def enrolment_address(self) -> str | None:
        """Where new peers enrol, host:port; None where TLS is off."""
        return self.servers[1].address if len(self.servers) > 1 else None

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._take_stock()
            with self.store.listening(lambda: loop.call_soon_threadsafe(self._wake.set)):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._keep_up(stopping))
                    if self.bucket is not None:
                        tasks.create_task(self.bucket.run(ready=lambda: None, stopping=stopping))
                    await _start(self.servers, tasks, stopping)
                    logger.info(
                        "serving", extra={"listen": self.address, "enrolment_listen": self.enrolment_address}
                    )
                    ready()
        finally:
            await self.spool.close()

    async def _keep_up(self, stopping: asyncio.Event) -> None:
        stopped = asyncio.create_task(stopping.wait())
        stopped.add_done_callback(lambda _: self._wake.set())
        try:
            while not stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(UPKEEP_S):
                        await self._wake.wait()
                self._wake.clear()
                await self._take_stock()
        finally:
            stopped.cancel()

    async def _take_stock(self) -> None:
        """Do what time alone makes necessary."""
        now = self.clock.now()
        await self.checking.turn(now)
        try:
            announced = await asyncio.to_thread(self.published.unlogged)
            await self.spool.announce(announced)
            await self.spool.evaluate(self.published.head())
            evaluated = self.spool.accounts.evaluations.under_way
            self.store.await_readers_of(None if evaluated is None else evaluated.version)
            await self.spool.expire()
            await self.trust.turn()
        except RefusedError as refused:
            # Tried again at the next turn: nothing was changed.
            logger.warning("upkeep refused", extra={"reason": refused.reason, "detail": str(refused)})
        for member in self.peers.expire(now):
            logger.warning(
                "peer not heard of",
                extra={"peer_role": member.peer.role, "node_id": member.peer.node_id, "state": member.state},
            )
        held_back = self.spool.held_back
        self.metrics.paused.set(held_back.pause is not None)
        self.metrics.drained.set(len(held_back.drained))
        head = self.peers.head
        self.metrics.head.set(0 if head is None else head.number)
        self.metrics.show(self.spool.accounts)
        self.live.note(self.peers.step)
        for _ in self.table.survey_parts(now):
            await asyncio.sleep(0)  # heartbeats are answered in between
        self.metrics.show_fleet(self.table.survey)
        self.metrics.show_steps(self.peers.step, self.peers.teaching)
        if not 0 <= now - self._gave_back_at_s < GIVE_BACK_EVERY_S:
            self._gave_back_at_s = now
            await asyncio.to_thread(give_back)


async def _start(servers: Sequence[RpcServer], tasks: asyncio.TaskGroup, stopping: asyncio.Event) -> None:
    for server in servers:
        is_ready = asyncio.Event()
        tasks.create_task(server.run(ready=is_ready.set, stopping=stopping))
        await is_ready.wait()  # a server that fails cancels this by way of the group
