"""The relay of a simulated run: production's forwarder and its spool on a real file."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from node.coordinator.work.verdicts import Submitted
from node.errors import Reason, RefusedError
from node.relay.forwarder import Forwarder
from node.relay.rollout_spool import RolloutSpool
from node.rollout import EncodedGroup, RolloutGroup, Verdict
from node.rpc.channel import ConnectionLost
from simulation.disks import SimulatedDisk
from simulation.hub import Hub
from simulation.network import Network, call
from simulation.reached import Instruments
from simulation.virtual_loop import Process
from simulation.witness import Witness

SPOOL_FILE = "rollouts.sqlite"
SPOOL_GROUPS = 16


class RelayDisk(SimulatedDisk):
    """The relay's: full, it refuses whatever would be written."""

    def run(self, work: Callable[[], Any]) -> Any:
        if self.is_full:
            raise RefusedError(Reason.DISK, "the relay's disk is full", fix="make room")
        return work()


class SimulatedRelay:
    """One life of the relay; also the stream to the coordinator that its forwarder speaks through."""

    def __init__(
        self,
        process: Process,
        disk: SimulatedDisk,
        *,
        network: Network,
        hub: Callable[[], Hub | None],
        group_of: Callable[[bytes], RolloutGroup],
        draw: random.Random,
        witness: Witness,
        reached: Counter[str],
    ) -> None:
        self.process = process
        self._network = network
        self._hub = hub
        self._group_of = group_of
        self._witness = witness
        self.spool = RolloutSpool.open(
            disk.directory / SPOOL_FILE, capacity_groups=SPOOL_GROUPS, capacity_bytes=1 << 20
        )
        instruments: Any = Instruments(reached)
        stream: Any = self
        self.forwarder = Forwarder(self.spool, stream, metrics=instruments, random=draw.random)
        process.loop.use_disk(self.forwarder._thread, disk)

    def start(self) -> None:
        self.process.spawn(self.forwarder._forward_for_ever())

    async def take(self, group: EncodedGroup) -> bool:
        return await self.forwarder.take(group)

    async def submit(self, encoded: EncodedGroup) -> tuple[Verdict, str]:
        """Hand a group on to the coordinator."""
        group = self._group_of(encoded.columns)

        def of_process() -> Process | None:
            hub = self._hub()
            return None if hub is None else hub.process

        async def handled() -> Submitted:
            hub = self._hub()
            if hub is None:
                raise ConnectionLost("the coordinator is down")
            return await hub.submit(encoded, group, is_relayed=True)

        link = self._network.link("relay", "coordinator")
        submitted = await call(self.process.loop, link, of_process, handled)
        self._witness.told(encoded.sampler_id, encoded.group_id, submitted.verdict)
        return submitted.verdict, submitted.detail
