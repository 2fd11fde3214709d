"""The learner's half of DrainRollouts: a stream that reconnects for ever.

Decisions are in ``outstanding_rollouts``. This is the shell, around a ``LastingStream``.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from typing import Final

import grpc.aio

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.clients.rollouts.outstanding_rollouts import OutstandingRollouts, Owed
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.rpc.lasting_stream import LastingStream
from node.system.backoff import Backoff
from node.system.waits import put_away
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import GroupVerdict
from node.values.limits import TRAINED_RUNS
from node.values.operator_order import Order, OrderAnswer
from node.values.run import StepRecord
from node.wire.mapping import from_wire, to_wire
from node.wire.rollouts import encoded_from_wire

logger = logging.getLogger(__name__)

NEWEST_LEDGER: Final = "newest ledger"
"""Name of the wait of a learner whose coordinator has an older ledger."""

LAST_RECORDS_LIMIT_S: Final = 5.0
"""Longest wait for the last acknowledgement once the learner stops. A coordinator that is there needs
milliseconds; one that was stopped with the learner does not come back."""


Receive = Callable[[EncodedGroup], None]
"""Called with each group that is delivered, as it came, on the event loop's thread."""


class RolloutDrain:
    """A service that receives groups and reports what became of them.

    Call ``judge`` and ``record`` from the event loop's thread. At most ``capacity_groups`` are received and
    neither refused nor trained on: the coordinator sends no more than there is room for.
    """

    name = "rollout drain"

    def __init__(
        self,
        channel: grpc.aio.Channel,
        receive: Receive,
        *,
        learner_epoch: int,
        version: int,
        capacity_groups: int,
        unacknowledged: Iterable[StepRecord],
        trained_slots: Sequence[tuple[int, int]] = (),
        backoff: Backoff,
        count_lost_stream: Callable[[], None],
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Go on from ``version``; ``waiting`` shows what the body waits for.

        Args:
            trained_slots: as ``record`` takes them; empty: not told.
        """
        self._receive = receive
        self._trained_slots = trained_slots
        self._learner_epoch = learner_epoch
        self._outstanding = OutstandingRollouts(
            version=version, capacity_groups=capacity_groups, unacknowledged=unacknowledged
        )
        self._stream = LastingStream(
            rollout_pb2_grpc.RolloutServiceStub(channel).DrainRollouts,
            hello=self._hello,
            owed=lambda: _messages(self._outstanding.take_owed()),
            hear=self._hear,
            refused=self._refused,
            lost=self._lost,
            backoff=backoff,
        )
        self._stopping = asyncio.Event()
        """As ``run`` has it; nothing more is received once it is set."""
        self._count_lost_stream = count_lost_stream
        self._waiting = waiting
        self._said_version = version
        """As the newest hello says."""
        self._acknowledgement = asyncio.Event()
        self._arrival = asyncio.Event()
        self.orders: tuple[Order, ...] = ()
        """Operators' orders, as the coordinator told them last; another tuple each time it does."""

    @property
    def unacknowledged(self) -> tuple[StepRecord, ...]:
        """Step records the coordinator may not have."""
        return self._outstanding.unacknowledged

    def judge(self, verdict: GroupVerdict) -> None:
        """Report what became of a delivered group."""
        self._outstanding.judged(verdict)
        self._stream.wake()

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Samplers whose groups are refused, and why; the coordinator keeps them over restarts."""
        return self._outstanding.quarantined

    def quarantine(self, sampler_id: str, why: str) -> None:
        """Report that a sampler is quarantined, or released where ``why`` is empty."""
        self._outstanding.quarantine(sampler_id, why)
        self._stream.wake()

    def answer(self, answer: OrderAnswer) -> None:
        """Report what became of an operator's order."""
        self._outstanding.answered(answer)
        self._stream.wake()

    async def arrival(self) -> None:
        """Wait until groups or orders have come since the last wait, or ``wake`` was called."""
        await self._arrival.wait()
        self._arrival.clear()

    def wake(self) -> None:
        """End the wait for an arrival."""
        self._arrival.set()

    def record(self, step: StepRecord, *, trained_slots: Sequence[tuple[int, int]] | None = None) -> None:
        """Report which groups a step consumed; the step must be durable already.

        Args:
            trained_slots: all that were ever trained on, by then: (first, last) of each run of numbers. None:
                as before.
        """
        if trained_slots is not None:
            self._trained_slots = trained_slots
        self._outstanding.stepped(step)
        self._stream.wake()

    async def acknowledged(self) -> None:
        """Wait until the coordinator has acknowledged every record."""
        while self._outstanding.unacknowledged:
            self._acknowledgement.clear()
            await self._acknowledgement.wait()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Receive groups until ``stopping``, then wait until the coordinator has acknowledged every record.

        The second part ends after ``LAST_RECORDS_LIMIT_S`` all the same: a record that is not acknowledged is
        in the journal, and is sent again at the next start.

        A coordinator whose ledger is behind this learner is asked again until it has the newest one, or an
        operator has accepted the loss; the log, the coordinator's status and an alert say so meanwhile.

        Raises RefusedError: The coordinator's answer is final: another learner has taken over, or this one is
        behind with the newest step that it has; or the ledger is behind while ``stopping``.
        """
        ready()
        self._stopping = stopping
        draining = asyncio.create_task(self._stream.run(stopping=stopping))
        drained = asyncio.create_task(self._last_acknowledged())
        try:
            await asyncio.wait({draining, drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await put_away(draining, drained)
        if not draining.cancelled():
            draining.result()
        if steps := self._outstanding.unacknowledged:
            logger.warning(
                "the coordinator has not acknowledged the last steps; they are sent again at the next start",
                extra={"versions": [step.version for step in steps]},
            )

    async def _last_acknowledged(self) -> None:
        await self._stopping.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_RECORDS_LIMIT_S):
                await self.acknowledged()

    def _refused(self, refusal: RefusedError) -> AbstractContextManager[None]:
        has_stepped = self._said_version < self._outstanding.version
        is_outdated = refusal.reason is Reason.ROLLBACK and has_stepped
        if refusal.reason is Reason.LEDGER_BEHIND and not self._stopping.is_set():
            logger.error("the coordinator's ledger is behind", extra={"detail": str(refusal)})
            return self._waiting(NEWEST_LEDGER)
        if not (refusal.reason.is_retryable or is_outdated):
            raise refusal
        logger.warning("drain refused", extra={"reason": refusal.reason, "detail": str(refusal)})
        return nullcontext()

    def _lost(self, lost: ConnectionLost) -> None:
        self._count_lost_stream()
        logger.warning("drain connection lost", extra={"detail": str(lost)})

    def _hello(self) -> rollout_pb2.DrainRolloutsRequest:
        self._outstanding.connected()
        self._said_version = self._outstanding.version
        runs = self._trained_slots if len(self._trained_slots) <= TRAINED_RUNS else ()
        return rollout_pb2.DrainRolloutsRequest(
            hello=rollout_pb2.DrainHello(
                learner_epoch=self._learner_epoch,
                version=self._said_version,
                steps=[to_wire(rollout_pb2.StepRecord, step) for step in self._outstanding.unacknowledged],
                held_group_ids=self._outstanding.held_group_ids,
                trained_slots=chain(*runs),
            )
        )

    def _hear(self, response: rollout_pb2.DrainRolloutsResponse) -> None:
        match response.WhichOneof("message"):
            case "group":
                self._take(response.group)
            case "step_acknowledged":
                self._outstanding.acknowledged(response.step_acknowledged.version)
                self._acknowledgement.set()
            case "quarantines":
                told = response.quarantines
                listed = {one.sampler_id: one.reason for one in told.samplers}
                self._outstanding.quarantines_listed(listed, releases_others=told.releases_others)
            case "orders":
                self.orders = tuple(from_wire(Order, order) for order in response.orders.orders)
                self.wake()

    def _take(self, message: rollout_pb2.EncodedGroup) -> None:
        group_id = message.group_id
        if not self._outstanding.has_room_for(group_id):
            raise ConnectionLost(f"the coordinator sent group {group_id} beyond the learner's credits")
        if self._outstanding.delivered(group_id) and not self._stopping.is_set():
            self._receive(encoded_from_wire(message))
            self.wake()


def _messages(owed: Owed) -> list[rollout_pb2.DrainRolloutsRequest]:
    messages = [
        rollout_pb2.DrainRolloutsRequest(judgement=to_wire(rollout_pb2.GroupJudgement, verdict))
        for verdict in owed.verdicts
    ]
    messages += [
        rollout_pb2.DrainRolloutsRequest(step=to_wire(rollout_pb2.StepRecord, step)) for step in owed.steps
    ]
    messages += [
        rollout_pb2.DrainRolloutsRequest(quarantine=rollout_pb2.Quarantine(sampler_id=name, reason=why))
        for name, why in owed.quarantines
    ]
    messages += [
        rollout_pb2.DrainRolloutsRequest(order_answer=to_wire(rollout_pb2.OrderAnswer, answer))
        for answer in owed.answers
    ]
    if owed.credit_groups:
        credit = rollout_pb2.DrainCredit(groups=owed.credit_groups)
        messages.append(rollout_pb2.DrainRolloutsRequest(credit=credit))
    return messages
