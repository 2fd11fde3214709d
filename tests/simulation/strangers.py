"""Samplers that keep no rule but TLS's; see ``bench.attack_lab`` for the same against real processes."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from node.coordinator.fleet.peer_reports import HeartbeatReport
from node.coordinator.work.slots.slot import group_id
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.rollout import EncodedGroup, PromptLease, RolloutGroup
from node.values.limits import LEASES_PER_REQUEST
from node.values.policy import PolicyVersion
from node.values.roles import Role
from simulation.faults import FaultKind, K, Plan
from simulation.hub import WORK, Hub, peer_of, root_of
from simulation.hub_calls import HubCalls
from simulation.network import Network
from simulation.sampler import KeepGroup, make_group
from simulation.virtual_loop import Process
from simulation.witness import Witness

PAUSE_S = 1.0
FLOOD_REQUESTS = 100
FLOOD_PAUSE_S = 4.0


class Stranger:
    """One hostile process, as long as it lives."""

    def __init__(
        self,
        kind: FaultKind,
        plan: Plan,
        process: Process,
        *,
        network: Network,
        hub: Callable[[], Hub | None],
        keep: KeepGroup,
        draw: random.Random,
        witness: Witness,
    ) -> None:
        self.process = process
        self._kind = kind
        self._plan = plan
        self._hub = hub
        self._call = HubCalls(process, network, hub)
        self._keep = keep
        self._draw = draw
        self._witness = witness
        self._peer = peer_of(process.name, Role.SAMPLER)
        self._leases: list[PromptLease] = []
        self._head = 0
        self._sent: list[tuple[str, RolloutGroup]] = []

    def start(self) -> None:
        self.process.spawn(self._run())

    async def _run(self) -> None:
        attack = {
            K.HOARDS: self._hoard,
            K.DROPS: self._drop,
            K.FAILS_ALL: self._fail_all,
            K.STEALS: self._steal,
            K.REPLAYS: self._replay,
            K.LIES: self._lie,
            K.FLOODS: self._flood,
        }[self._kind]
        while True:
            try:
                await self._call(
                    lambda hub: hub.join_sampler(
                        self._peer, self._held, instance=self.process.name, prompts=self._prompts
                    )
                )
                while True:
                    await self._send_heartbeat()
                    await attack()
                    await asyncio.sleep(PAUSE_S)
            except (ConnectionLost, RefusedError):
                await asyncio.sleep(PAUSE_S)

    @property
    def _prompts(self) -> int:
        """Prompts that it says the task has."""
        return self._plan.prompts + (self._kind is K.LIES and self._draw.random() < 0.5)

    @property
    def _held(self) -> PolicyVersion:
        return PolicyVersion(self._head, root_of(self._head))

    async def _send_heartbeat(self) -> None:
        running = tuple(lease.lease_id for lease in self._leases) if self._kind is K.HOARDS else ()
        report = HeartbeatReport(self._held, has_heard=True, instance=self.process.name)
        answer, _ = await self._call(lambda hub: hub.heartbeat(self._peer, report, running))
        self._head = 0 if answer.head is None else answer.head.number

    async def _lease(self) -> list[PromptLease]:
        grant = await self._call(
            lambda hub: hub.lease(
                self._peer, LEASES_PER_REQUEST, self._held, stays=bool(self._draw.getrandbits(1))
            )
        )
        return list(grant.leases)

    async def _hoard(self) -> None:
        self._leases += await self._lease()

    async def _drop(self) -> None:
        await self._lease()

    async def _fail_all(self) -> None:
        failed = tuple(
            FailedLease(one.lease_id, Failure.PROMPT_TOO_LONG, "a lie") for one in await self._lease()
        )
        if failed:
            await self._call(lambda hub: hub.release(self._peer, (), failed))

    async def _steal(self) -> None:
        hub = self._hub()
        slots = () if hub is None else tuple(hub.accounts.slots.open_slots.values())
        if not slots:
            return
        slot = self._draw.choice(
            slots
        )  # a thief that guesses well: ids and the order of prompts are no secret
        name = group_id(slot.number, max(1, slot.granted))
        lease = PromptLease(name, WORK.task, slot.prompt_index, WORK.group_size, WORK.sampling, 1.0)
        lease = replace(lease, task_digest=hub.accounts.work.task_digest if hub else b"")
        await self._submit(name, make_group(lease, self._head, self._head, at_s=(1.0, 2.0)))
        await self._call(lambda hub: hub.release(self._peer, (name,), ()))

    async def _replay(self) -> None:
        for lease in await self._lease():
            group = make_group(lease, self._head, self._head, at_s=(1.0, 2.0))
            self._sent.append((lease.lease_id, group))
        for name, group in self._sent[-8:]:
            await self._submit(name, group)

    async def _lie(self) -> None:
        for lease in await self._lease():
            honest = make_group(lease, self._head, self._head, at_s=(1.0, 2.0))
            lie: dict[str, Any] = self._draw.choice(
                (
                    {"prompt_index": lease.prompt_index + 1},
                    {"run_id": "another"},
                    {"task": "another"},
                    {"layout_digest": b"x" * 16},
                    {"completions": honest.completions * 2},
                    {"prompt_token_ids": honest.prompt_token_ids[:0]},
                )
            )
            group = replace(honest, **lie)
            if self._draw.random() < 0.3:
                group = make_group(lease, self._head + 50, self._head + 50, at_s=(1.0, 2.0))
            await self._submit(lease.lease_id, group)

    async def _flood(self) -> None:
        requests = [self._lease() for _ in range(FLOOD_REQUESTS)]
        await asyncio.gather(*requests, return_exceptions=True)
        await asyncio.sleep(FLOOD_PAUSE_S)

    async def _submit(self, name: str, group: RolloutGroup) -> None:
        encoded = EncodedGroup(b"header", self._keep(group), name, self.process.name)
        submitted = await self._call(lambda hub: hub.submit(encoded, group))
        self._witness.told(self.process.name, name, submitted.verdict)
