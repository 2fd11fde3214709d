"""The relay of a simulated run: production's forwarder, its spool on a real file, and its carrier."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from heterorl.v1 import common_pb2, membership_pb2, rollout_pb2
from node.coordinator.peers import HeartbeatReport
from node.coordinator.work.verdicts import Submitted
from node.errors import Reason, RefusedError
from node.failure import FailedLease
from node.identity.own_identity import RenewedCertificates
from node.identity.peer import Peer
from node.identity.relay_voucher import vouch
from node.policy import PolicyVersion
from node.relay.carried import CarriedMembers, CarriedRollouts
from node.relay.carrier import Carrier
from node.relay.forwarder import Forwarder
from node.relay.rollout_spool import RolloutSpool
from node.relay.sampler_sessions import Sessions
from node.rollout import EncodedGroup, LeaseGrant, RolloutGroup
from node.rpc.channel import ConnectionLost
from node.verdict import Verdict
from node.wire.mapping import from_wire, optional_from_wire, optional_to_wire, role_to_wire, to_wire
from simulation.disks import SimulatedDisk
from simulation.hub import LAYOUT, RUN_ID, TOKENIZER, Hub, root_of
from simulation.network import Link, Network, Stream, call
from simulation.reached import Instruments
from simulation.virtual_loop import Clock, Process
from simulation.witness import Witness

SPOOL_FILE = "rollouts.sqlite"
SPOOL_GROUPS = 16


class RelayDisk(SimulatedDisk):
    """The relay's: full, it refuses whatever would be written."""

    def run(self, work: Callable[[], Any]) -> Any:
        if self.is_full:
            raise RefusedError(Reason.DISK, "the relay's disk is full", fix="make room")
        return work()


class CarriedCall:
    """A call of Carry: what gRPC's client gives, over the simulated network."""

    def __init__(self, process: Process, link: Link, hub: Hub) -> None:
        self._process, self._link, self._hub_process = process, link, hub.process
        self._said: Stream[Any] = Stream(process.loop, link)
        self._told: Stream[Any] = Stream(process.loop, link)
        self._serving = hub.process.spawn(hub.serve_relay(self._said, self._told))

    async def write(self, message: Any) -> None:
        self._said.send(message)

    async def read(self) -> Any:
        return await self._told.next()

    def cancel(self) -> None:
        self._said.end(ConnectionLost("the relay's stream ended"))
        if self._hub_process.is_alive:  # it notices a moment later
            self._process.loop.call_later(self._link.delay_s(), self._serving.cancel)


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
        clock: Clock,
        witness: Witness,
        reached: Counter[str],
    ) -> None:
        self.process = process
        self._clock = clock
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

        self.carrier = Carrier(
            self._open_stream,
            sessions := Sessions(),
            metrics=instruments,
            monotonic=process.loop.time,
            random=draw.random,
        )
        self.members = CarriedMembers(
            "relay",
            sessions,
            self.carrier,
            clock,
            RenewedCertificates(),
            clock_offset_s=lambda: 0.0,
            random=draw.random,
        )
        self.rollouts = CarriedRollouts(sessions, self.carrier, self.forwarder, lambda: None)

    def start(self) -> None:
        self.process.spawn(self.forwarder._forward_for_ever())
        self.process.spawn(self.carrier._keep())

    async def take(self, group: EncodedGroup) -> bool:
        return await self.forwarder.take(group)

    # What its samplers call, as the servicers do.

    async def join_sampler(self, peer: Peer, held: PolicyVersion, *, instance: str, prompts: int) -> None:
        voucher = vouch(peer, "relay", instance=instance, now=self._clock.now())
        request = membership_pb2.JoinRequest(
            run_id=RUN_ID,
            role=role_to_wire(peer.role),
            layout_digest=LAYOUT,
            tokenizer_digest=TOKENIZER,
            held=to_wire(common_pb2.PolicyVersion, held),
            instance=instance,
            prompts=prompts,
            base_root=root_of(0),
            voucher=to_wire(membership_pb2.RelayVoucher, voucher),
        )
        await self.members.join(peer, request, address=peer.node_id, certificate=b"")

    async def heartbeat(
        self, peer: Peer, report: HeartbeatReport, running: tuple[str, ...]
    ) -> tuple[PolicyVersion | None, tuple[str, ...]]:
        """Return the newest version that is announced, and leases that were lost."""
        request = membership_pb2.HeartbeatRequest(
            held=optional_to_wire(common_pb2.PolicyVersion, report.held),
            running_lease_ids=running,
            waits_for=report.waits_for,
            instance=report.instance,
        )
        answer = self.members.heartbeat(peer, request, has_heard=report.has_heard, address=peer.node_id)
        head = optional_from_wire(PolicyVersion, answer, "head")
        return head, tuple(answer.lost_lease_ids)

    async def lease(self, peer: Peer, wanted: int, held: PolicyVersion, *, stays: bool) -> LeaseGrant:
        request = rollout_pb2.LeasePromptsRequest(
            max_leases=wanted, held=to_wire(common_pb2.PolicyVersion, held), stays=stays
        )
        return from_wire(LeaseGrant, await self.rollouts.lease(peer, request))

    async def release(self, peer: Peer, lease_ids: tuple[str, ...], failed: tuple[FailedLease, ...]) -> int:
        request = rollout_pb2.ReleaseLeasesRequest(
            lease_ids=lease_ids, failed=[to_wire(rollout_pb2.FailedLease, lease) for lease in failed]
        )
        return (await self.rollouts.release(peer, request)).released

    def _open_stream(self) -> "CarriedCall":
        hub, link = self._hub(), self._network.link("relay", "coordinator")
        if hub is None or link.is_cut:
            raise ConnectionLost("the coordinator cannot be reached")
        return CarriedCall(self.process, link, hub)

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
