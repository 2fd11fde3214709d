"""The coordinator as one service: its servers, its upkeep, and the ledger that outlives both."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from node.coordinator.lifecycle.published import Published
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.operators.order_desk import LeaderDesk
from node.coordinator.peers.peer_table import PeerTable
from node.coordinator.peers.peers import Peers
from node.coordinator.requests.door import Door
from node.coordinator.run_status import LiveStatus
from node.coordinator.streams.reward_checking import RewardChecking
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.decisions import announcements, leasing
from node.errors import RefusedError
from node.process.memory import GIVE_BACK_EVERY_S, give_back
from node.process.service import Service
from node.rpc.calls.server import RpcServer
from node.values.operator_order import DRAIN
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket_mirror import BucketMirror

logger = logging.getLogger(__name__)

UPKEEP_S: Final = 1.0
"""How late an expiry, a silence or a metric may be noticed; far below any of their terms."""


@dataclass(slots=True)
class CoordinatorService:
    """Serves until stopped; the ledger is closed when nobody can ask for it any more."""

    door: Door
    table: PeerTable
    store: ArtifactStore
    bucket: BucketMirror | None
    published: Published
    checking: RewardChecking
    live: LiveStatus
    servers: Sequence[RpcServer]
    """The members' and, unless TLS is off, the enrolment's."""
    desk: LeaderDesk
    order_server: Service | None
    """Takes operators' orders; None: in a simulation nobody calls."""
    metrics: CoordinatorMetrics
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

    @property
    def peers(self) -> Peers:
        """The peers of the run; read only."""
        return self.door.peers

    @property
    def accounts(self) -> Accounts:
        """The accounts that the ledger adds up to; read only."""
        return self.door.ledger.accounts

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._take_stock()
            with self.store.listening(lambda: loop.call_soon_threadsafe(self._wake.set)):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._keep_up(stopping))
                    if self.bucket is not None:
                        tasks.create_task(self.bucket.run(ready=lambda: None, stopping=stopping))
                    local = () if self.order_server is None else (self.order_server,)
                    await _start((*self.servers, *local), tasks, stopping)
                    logger.info(
                        "serving", extra={"listen": self.address, "enrolment_listen": self.enrolment_address}
                    )
                    ready()
        finally:
            await self.door.close()

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
        ledger, peers, now = self.door.ledger, self.peers, self.door.clock.now()
        await self.checking.turn(now)
        try:
            announced = await asyncio.to_thread(self.published.unlogged)
            await ledger.decide(partial(announcements.announced, request=announced))
            await ledger.decide(announcements.evaluation_turn)
            head = self.published.head()
            self.accounts.evaluations.plan(0 if head is None else head.number)
            evaluated = self.accounts.evaluations.under_way
            self.store.await_readers_of(None if evaluated is None else evaluated.version)
            self._note_time()
            await ledger.decide(leasing.expiry)
            await self.desk.carry_out_overdue()
        except RefusedError as refused:
            # Tried again at the next turn: nothing was changed.
            logger.warning("upkeep refused", extra={"reason": refused.reason, "detail": str(refused)})
        for member in peers.expire(now):
            logger.warning(
                "peer not heard of",
                extra={"peer_role": member.peer.role, "node_id": member.peer.node_id, "state": member.state},
            )
        orders = self.accounts.orders
        self.metrics.paused.set(orders.pause is not None)
        self.metrics.drained.set(len(orders.of(DRAIN)))
        self.metrics.head.set(0 if peers.head is None else peers.head.number)
        self.metrics.show(self.accounts)
        self.live.note(peers.step)
        for _ in self.table.survey_parts(now):
            await asyncio.sleep(0)  # heartbeats are answered in between
        self.metrics.show_fleet(self.table.survey)
        self.live.report.look(now)
        self.metrics.show_pace(self.live.report.pace.found)
        self.metrics.show_steps(peers.step, peers.teaching)
        if not 0 <= now - self._gave_back_at_s < GIVE_BACK_EVERY_S:
            self._gave_back_at_s = now
            await asyncio.to_thread(give_back)

    def _note_time(self) -> None:
        if set_back_s := self.accounts.note_time(self.door.clock.now()):
            logger.warning(
                "this machine's clock was set back",
                extra={"seconds": round(set_back_s, 3), "note": "leases end within a full term"},
            )


async def _start(servers: Sequence[Service], tasks: asyncio.TaskGroup, stopping: asyncio.Event) -> None:
    for server in servers:
        is_ready = asyncio.Event()
        tasks.create_task(server.run(ready=is_ready.set, stopping=stopping))
        await is_ready.wait()  # a server that fails cancels this by way of the group
