"""The contributor's half of Contribute: a stream to the learner that reconnects for ever.

Its user keeps the account of groups and contributions. This is the shell: one writer that sends credits and
contributions, one reader that receives terms, groups and answers. At the end a last stream says what is still
held, which is nothing but a contribution under way, so that the learner deals the other groups again at once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import grpc.aio

from heterorl.v1 import merge_pb2, merge_pb2_grpc, rollout_pb2
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost, classified
from node.system.backoff import Backoff
from node.system.waits import put_away
from node.values.contribution import Contribution, ContributionAnswer, MergeTerms
from node.values.groups.rollout import EncodedGroup
from node.wire.mapping import from_wire
from node.wire.rollouts import encoded_from_wire

logger = logging.getLogger(__name__)

PART_BYTES: Final = 1 << 20
"""Largest part of a payload in one message, as merge.proto allows."""

REASON_LIMIT_S: Final = 1.0
"""Longest wait for the end of a stream on which nothing can be written any more."""

GOODBYE_LIMIT_S: Final = 2.0
"""Longest wait for the learner to note what is given back; else it does once it has missed the stream."""

_Call = grpc.aio.StreamStreamCall[merge_pb2.ContributeRequest, merge_pb2.ContributeResponse]


@dataclass(frozen=True, slots=True)
class OwedToLearner:
    """Messages to send now."""

    credit_groups: int
    contribution: Contribution | None


class Account(Protocol):
    """An account between contributor and learner; asked and told on the event loop's thread."""

    @property
    def held_group_ids(self) -> tuple[str, ...]:
        """Every group that is here, those of a contribution under way among them."""

    @property
    def travelling_group_ids(self) -> tuple[str, ...]:
        """Groups of a contribution that was not answered."""

    def connected(self) -> None:
        """Begin a new stream: credits are void, and a contribution under way is owed again."""

    def take_owed(self) -> OwedToLearner:
        """Return what to send now, and count it as sent."""

    def told(self, terms: MergeTerms) -> None:
        """Note the learner's terms. Raises StartupError: they cannot be kept."""

    def has_room_for(self, group_id: str) -> bool:
        """Whether a delivery is within the credits."""

    def delivered(self, group: EncodedGroup) -> None:
        """Note a group that was dealt to this contributor."""

    def taken(self, group_ids: Iterable[str]) -> None:
        """Note groups that are dealt to others now."""

    def answered(self, answer: ContributionAnswer) -> bool:
        """Note an answer; return whether it is one to the contribution under way."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Told of what the stream brings, once the account has it, on the event loop's thread."""

    changed: Callable[[], None]
    """Anything came."""
    answered: Callable[[ContributionAnswer], None]
    """An answer to the contribution under way."""
    lost: Callable[[], None]


class ContributeStream:
    """Streams to the learner, one after the other."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        account: Account,
        *,
        layout_digest: bytes,
        base_root: bytes,
        listener: Listener,
        backoff: Backoff,
    ) -> None:
        """Prepare; nothing is dialled before ``run``."""
        self._stub = merge_pb2_grpc.MergeServiceStub(channel)
        self._account = account
        self._layout_digest = layout_digest
        self._base_root = base_root
        self._listener = listener
        self._backoff = backoff
        self._something_owed = asyncio.Event()

    def wake(self) -> None:
        """Send what is owed by now."""
        self._something_owed.set()

    async def run(self) -> None:
        """Receive and send until cancelled.

        Raises:
            RefusedError: for a reason that is final: another model than the run's.
            StartupError: the learner's terms cannot be kept.
        """
        while True:
            try:
                await self._one_stream()
            except RefusedError as refused:
                if not refused.reason.is_retryable:
                    raise
                logger.warning(
                    "the learner refuses contributions now",
                    extra={"reason": refused.reason, "detail": str(refused)},
                )
            except ConnectionLost as lost:
                self._listener.lost()
                logger.warning("connection to the learner lost", extra={"detail": str(lost)})
            await self._backoff.wait()

    async def say_goodbye(self) -> None:
        """Say that no group is held but those of a contribution under way; the stream has ended."""
        try:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                with classified():
                    call = self._stub.Contribute()
                    try:
                        await call.write(self._hello(self._account.travelling_group_ids))
                        await call.read()  # the terms: it has read the hello
                    finally:
                        call.cancel()
        except (RefusedError, ConnectionLost, TimeoutError) as error:
            logger.info("the learner was not told what is given back", extra={"detail": str(error)})

    async def _one_stream(self) -> None:
        call = self._stub.Contribute()
        self._account.connected()
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            # Where the learner has ended the stream, both fail, and the reader knows why.
            await asyncio.wait({reader}, timeout=REASON_LIMIT_S)
        finally:
            call.cancel()
            await put_away(reader, writer)
        with classified():
            for task in (reader, writer):
                if not task.cancelled():
                    task.result()

    def _hello(self, held_group_ids: tuple[str, ...]) -> merge_pb2.ContributeRequest:
        hello = merge_pb2.ContributorHello(
            layout_digest=self._layout_digest,
            base_root=self._base_root,
            held_group_ids=held_group_ids,
        )
        return merge_pb2.ContributeRequest(hello=hello)

    async def _write(self, call: _Call) -> None:
        await call.write(self._hello(self._account.held_group_ids))
        while True:
            self._something_owed.clear()
            owed = self._account.take_owed()
            if owed.contribution is not None:
                for message in _messages(owed.contribution):
                    await call.write(message)
            if owed.credit_groups:
                credit = rollout_pb2.DrainCredit(groups=owed.credit_groups)
                await call.write(merge_pb2.ContributeRequest(credit=credit))
            await self._something_owed.wait()

    async def _read(self, call: _Call) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, merge_pb2.ContributeResponse):  # grpc.aio.EOF
                return
            self._backoff.reset()
            match response.WhichOneof("message"):
                case "terms":
                    self._account.told(from_wire(MergeTerms, response.terms))
                case "group":
                    self._take(response.group)
                case "answer":
                    answer = from_wire(ContributionAnswer, response.answer)
                    if self._account.answered(answer):
                        self._listener.answered(answer)
                case "taken":
                    self._account.taken(response.taken.group_ids)
            self.wake()
            self._listener.changed()

    def _take(self, message: rollout_pb2.EncodedGroup) -> None:
        if not self._account.has_room_for(message.group_id):
            raise ConnectionLost(f"the learner dealt group {message.group_id} beyond the credits")
        self._account.delivered(encoded_from_wire(message))


def _messages(contribution: Contribution) -> Iterator[merge_pb2.ContributeRequest]:
    payload = contribution.payload
    header = merge_pb2.ContributionHeader(
        number=contribution.number,
        base_version=contribution.base_version,
        report=contribution.report,
        payload_bytes=len(payload),
        payload_digest=contribution.payload_digest,
    )
    yield merge_pb2.ContributeRequest(contribution=header)
    for at in range(0, len(payload), PART_BYTES):
        yield merge_pb2.ContributeRequest(payload=payload[at : at + PART_BYTES])
