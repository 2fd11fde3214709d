"""A verifier of a simulated run whose groups come without rewards: it grades what it is sent, or cannot."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.values.groups.failure import Failure
from node.values.groups.reward_finding import GroupGrades, RewardCheck, RewardFinding
from node.values.groups.rollout import EncodedGroup
from node.wire.rollouts import finding_to_wire
from simulation.hub import Hub
from simulation.network import Network, Stream
from simulation.virtual_loop import Process
from simulation.witness import Witness

GROUPS_AT_ONCE: Final = 3
GRADES: Final = GroupGrades(np.array([0.0, 1.0], np.float32))
_UNGRADABLE, _SKIPPED = 0.05, 0.1
"""Shares of the groups."""


class SimulatedVerifier:
    """One life of a verifier."""

    def __init__(
        self,
        process: Process,
        *,
        network: Network,
        hub: Callable[[], Hub | None],
        draw: random.Random,
        witness: Witness,
    ) -> None:
        self.process = process
        self._network = network
        self._hub = hub
        self._draw = draw
        self._witness = witness

    def start(self) -> None:
        self.process.spawn(self._verify())

    async def _verify(self) -> None:
        backoff = Backoff(self._draw.random)
        while True:
            with contextlib.suppress(RefusedError, ConnectionLost):
                await self._one_stream()
            await backoff.wait()
            backoff.reset()

    async def _one_stream(self) -> None:
        link = self._network.link(self.process.name, "coordinator")
        said: Stream[Any] = Stream(self.process.loop, link)
        told: Stream[Any] = Stream(self.process.loop, link)
        hub = self._hub()
        if hub is None or link.is_cut:
            raise ConnectionLost("the coordinator cannot be reached")
        serving = hub.process.spawn(hub.serve_checks(self.process.name, GROUPS_AT_ONCE, said, told))
        grading: set[asyncio.Task[None]] = set()
        try:
            while (group := await told.next()) is not None:
                grading.add(self.process.spawn(self._grade(group, said)))
        finally:
            said.end(ConnectionLost("the verifier's stream ended"))
            for task in grading:
                task.cancel()
            if hub.process.is_alive:  # it notices a moment later
                self.process.loop.call_later(link.delay_s(), serving.cancel)

    async def _grade(self, group: EncodedGroup, said: Stream[Any]) -> None:
        await asyncio.sleep(0.2 + self._draw.expovariate(1.0))
        finding = RewardFinding(group.group_id, RewardCheck.GRADED, grades=GRADES)
        drawn = self._draw.random()
        if drawn < _UNGRADABLE:
            self._witness.excuse(group.group_id, "the grader fails on it")
            fault = Failure.GRADING_FAILED
            finding = RewardFinding(group.group_id, RewardCheck.UNGRADABLE, "it raises", fault)
        elif drawn < _SKIPPED:
            finding = RewardFinding(group.group_id, RewardCheck.SKIPPED, "the judge is away")
        said.send(finding_to_wire(finding))
