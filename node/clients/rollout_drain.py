"""The learner's half of DrainRollouts: a stream that reconnects for ever.

Decisions are in ``node.clients.drain_book``; this is the shell: one writer that says what is owed
whenever something is, one reader that takes groups and acknowledgements.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import grpc.aio

from heterorl.v1 import rollout_pb2, rollout_pb2_grpc
from node.clients.drain_book import DrainBook, Owed
from node.errors import Reason, RefusedError
from node.rollout import DeliveredGroup, GroupVerdict, Verdict
from node.rpc.channel import Backoff, ConnectionLost, classified
from node.run import StepRecord
from node.wire import delivered_group_from_wire, step_record_to_wire, verdict_to_wire

logger = logging.getLogger(__name__)

NEWEST_LEDGER: Final = "newest ledger"
"""What a learner waits for whose coordinator has an older ledger."""

_Call = grpc.aio.StreamStreamCall[rollout_pb2.DrainRolloutsRequest, rollout_pb2.DrainRolloutsResponse]


class RolloutDrain:
    """A service that fills ``groups`` and tells the hub what became of them.

    Call ``judge`` and ``record`` from the event loop's thread. ``groups`` holds at most
    ``capacity_groups``: the hub sends no more than there is room for.
    """

    name = "rollout drain"

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        learner_epoch: int,
        version: int,
        capacity_groups: int,
        unacknowledged: Iterable[StepRecord],
        backoff: Backoff,
        count_lost_stream: Callable[[], None],
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Go on from the checkpoint of ``version``; ``waiting`` shows what the body waits for."""
        self._stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self._learner_epoch = learner_epoch
        self._book = DrainBook(
            version=version, capacity_groups=capacity_groups, unacknowledged=unacknowledged
        )
        self._backoff = backoff
        self._count_lost_stream = count_lost_stream
        self._waiting = waiting
        self._something_owed = asyncio.Event()
        self._acknowledgement = asyncio.Event()
        self.groups: asyncio.Queue[DeliveredGroup] = asyncio.Queue(maxsize=capacity_groups)

    @property
    def unacknowledged(self) -> tuple[StepRecord, ...]:
        """Step records the hub may not have: part of every checkpoint."""
        return self._book.unacknowledged

    def judge(self, verdict: GroupVerdict) -> None:
        """Say what became of a delivered group."""
        self._book.judged(verdict)
        self._something_owed.set()

    def record(self, step: StepRecord) -> None:
        """Say which groups a step consumed; the step must be durable already."""
        self._book.stepped(step)
        self._something_owed.set()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Drain until ``stopping``, then until the hub has acknowledged every record.

        The daemon's drain timeout bounds the second part: a record the hub has not
        acknowledged is in the checkpoint and is said again at the next start.

        A coordinator whose ledger is behind this learner is asked again until it has the newest one, or an
        operator has accepted the loss; the log, the coordinator's status and an alert say so meanwhile.

        Raises:
            RefusedError: the coordinator's answer is final: another learner has taken over, this one is
                behind; or the ledger is behind, and this is to stop.
        """
        ready()
        while not stopping.is_set() or self._book.unacknowledged:
            wait: AbstractContextManager[None] = nullcontext()
            try:
                await self._one_stream(stopping)
                self._backoff.reset()
            except RefusedError as refused:
                if refused.reason is Reason.LEDGER_BEHIND and not stopping.is_set():
                    wait = self._waiting(NEWEST_LEDGER)
                    logger.error("the coordinator's ledger is behind", extra={"detail": str(refused)})
                elif not refused.reason.is_retryable:
                    raise
                else:
                    logger.warning("drain refused", extra={"reason": refused.reason, "detail": str(refused)})
            except ConnectionLost as lost:
                self._count_lost_stream()
                logger.warning("drain connection lost", extra={"detail": str(lost)})
            with wait:
                await self._backoff.wait(None if stopping.is_set() else stopping)

    async def _one_stream(self, stopping: asyncio.Event) -> None:
        call = self._stub.DrainRollouts()
        self._book.connected()
        reader = asyncio.create_task(self._read(call, stopping))
        writer = asyncio.create_task(self._write(call))
        settled = asyncio.create_task(self._settled(stopping))
        tasks = (reader, writer, settled)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.wait(tasks)
        with classified():
            for task in done:
                task.result()

    def _hello(self) -> rollout_pb2.DrainRolloutsRequest:
        return rollout_pb2.DrainRolloutsRequest(
            hello=rollout_pb2.DrainHello(
                learner_epoch=self._learner_epoch,
                version=self._book.version,
                steps=[step_record_to_wire(step) for step in self._book.unacknowledged],
                held_group_ids=self._book.held_group_ids,
            )
        )

    async def _write(self, call: _Call) -> None:
        await call.write(self._hello())
        while True:
            self._something_owed.clear()
            for message in _messages(self._book.take_owed()):
                await call.write(message)
            await self._something_owed.wait()

    async def _read(self, call: _Call, stopping: asyncio.Event) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, rollout_pb2.DrainRolloutsResponse):  # grpc.aio.EOF
                return
            self._backoff.reset()
            match response.WhichOneof("message"):
                case "group":
                    self._receive(response.group, stopping)
                case "step_acknowledged":
                    self._book.acknowledged(response.step_acknowledged.version)
                    self._acknowledgement.set()

    def _receive(self, message: rollout_pb2.DeliveredGroup, stopping: asyncio.Event) -> None:
        group_id = message.group.group_id
        if not self._book.delivered(group_id) or stopping.is_set():
            return
        try:
            self.groups.put_nowait(delivered_group_from_wire(message))
        except RefusedError as refused:
            self.judge(GroupVerdict(group_id, Verdict.MALFORMED, str(refused)))
        except asyncio.QueueFull:
            raise ConnectionLost(f"the hub sent group {group_id} beyond the learner's credits") from None

    async def _settled(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        while self._book.unacknowledged:
            self._acknowledgement.clear()
            await self._acknowledgement.wait()


def _messages(owed: Owed) -> list[rollout_pb2.DrainRolloutsRequest]:
    messages = [
        rollout_pb2.DrainRolloutsRequest(
            judgement=rollout_pb2.GroupJudgement(
                group_id=judgement.group_id,
                verdict=verdict_to_wire(judgement.verdict),
                detail=judgement.detail,
            )
        )
        for judgement in owed.judgements
    ]
    messages += [rollout_pb2.DrainRolloutsRequest(step=step_record_to_wire(step)) for step in owed.steps]
    if owed.credit_groups:
        credit = rollout_pb2.DrainCredit(groups=owed.credit_groups)
        messages.append(rollout_pb2.DrainRolloutsRequest(credit=credit))
    return messages
