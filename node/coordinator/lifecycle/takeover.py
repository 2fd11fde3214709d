"""A coordinator that shares its ledger's database with others: it stands by until it leads, then serves.

    standing by: the members' port refuses every call --leads--> builds the coordinator --> serves
                                                                     deposed: ends with exit code 4

It knows nothing of the run before it leads: it reads all of that from the ledger then.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from node.coordinator.ledger.leadership import Leader, Leadership
from node.coordinator.lifecycle.coordinator_service import CoordinatorService
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.operators.order_desk import StandbyDesk, order_server
from node.errors import DeposedError, Reason, RefusedError
from node.identity.revocation import RevocationList
from node.process.daemon import Phase
from node.process.role_context import RoleContext
from node.rpc.address import join_address, split_address
from node.serving.hub_setup import make_server
from node.system.waits import put_away, wait_at_most

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""How often a coordinator on standby tries to lead."""

_ANYWHERE: Final = ("0.0.0.0", "::")


def address_for_people(listen: str) -> str:
    """Return where a coordinator that listens there may be reached, with this host's name for any address."""
    host, port = split_address(listen)
    return join_address(socket.gethostname(), port) if host in _ANYWHERE else listen


@dataclass(slots=True)
class Candidate:
    """One of the run's coordinators, as a service that is ready once it leads."""

    context: RoleContext
    leadership: Leadership
    listen: str
    build: Callable[[Leadership, Callable[[DeposedError], None]], Awaitable[CoordinatorService]]
    """Makes the coordinator that leads; the function is called, in any thread, when it leads no longer."""
    metrics: CoordinatorMetrics
    name: str = "coordinator"
    _leader: Leader | None = None

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Serve as the leader, once this coordinator leads.

        Raises:
            DeposedError: it leads no longer.
            StartupError: the coordinator could not start.
        """
        try:
            if await self._try_to_lead() or await self._stand_by(stopping):
                await self._lead(ready, stopping)
        finally:
            await asyncio.to_thread(self.leadership.close)

    async def _try_to_lead(self) -> bool:
        return await asyncio.to_thread(self.leadership.try_to_lead)

    async def _stand_by(self, stopping: asyncio.Event) -> bool:
        """Refuse every call until this coordinator leads; return whether it does."""
        server = make_server(
            self.context,
            "members",
            listen=self.listen,
            revocations=RevocationList(),  # whoever calls is refused
            servicers=(),
            standby=self._refusal,
        )
        await self._look_who_leads()  # callers are told
        is_over, leads = asyncio.Event(), False
        async with asyncio.TaskGroup() as tasks:
            for service in (server, order_server(self.context.state_dir, StandbyDesk(self._refusal))):
                listening = asyncio.Event()
                tasks.create_task(service.run(ready=listening.set, stopping=is_over))
                await listening.wait()
            self.context.announce(Phase.STANDBY)
            logger.info("standing by", extra={"listen": server.address})
            while not stopping.is_set() and not (leads := await self._try_to_lead()):
                await self._look_who_leads()
                await wait_at_most(stopping, LOOK_S)
            is_over.set()
        return leads

    async def _look_who_leads(self) -> None:
        leader = await asyncio.to_thread(self.leadership.leader)
        if leader != self._leader:
            logger.info("another coordinator leads", extra={"leader": leader and leader.address})
        self._leader = leader

    async def _lead(self, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        logger.info("leading", extra={"epoch": self.leadership.epoch})
        self.metrics.leads.set(1)
        loop = asyncio.get_running_loop()
        deposed: asyncio.Future[DeposedError] = loop.create_future()

        def depose(error: DeposedError) -> None:
            if not deposed.done():
                deposed.set_result(error)

        def on_lost(error: DeposedError) -> None:
            loop.call_soon_threadsafe(depose, error)

        async def serve() -> None:
            coordinator = await self.build(self.leadership, on_lost)
            await coordinator.run(ready=ready, stopping=stopping)

        serving = asyncio.create_task(serve())
        try:
            ends: set[asyncio.Future[Any]] = {serving, deposed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.metrics.leads.set(0)
            await put_away(serving)  # at once: who is deposed has nothing to say to anyone
        if deposed.done():
            raise deposed.result()
        await serving

    def _refusal(self) -> RefusedError:
        leader = self._leader
        where = "nobody leads yet" if leader is None else f"the one at {leader.address} leads"
        return RefusedError(
            Reason.STANDBY, f"this coordinator stands by: {where}", fix="list all in node.coordinator"
        )
