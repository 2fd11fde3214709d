"""The contributor's half of Contribute: a stream to the learner that reconnects for ever.

Its user keeps the account of groups and contributions. At the end a last stream says what is still held:
nothing but a contribution under way. So the learner deals the other groups again at once.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import grpc.aio

from heterorl.v1 import merge_pb2, merge_pb2_grpc, rollout_pb2
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost, classified
from node.rpc.lasting_stream import LastingStream
from node.system.backoff import Backoff
from node.values.contribution import Contribution, ContributorHello, ToContributor
from node.wire.contributions import contribution_to_wire, told_from_wire
from node.wire.mapping import to_wire

logger = logging.getLogger(__name__)

GOODBYE_LIMIT_S: Final = 2.0
"""Longest wait for the learner to note what is given back; else it does once it has missed the stream."""


@dataclass(frozen=True, slots=True)
class OwedToLearner:
    """Messages to send now."""

    credit_groups: int
    contribution: Contribution | None


class Account(Protocol):
    """An account between contributor and learner; asked and told on the event loop's thread."""

    def hello(self) -> ContributorHello:
        """Begin a new stream: credits are void, and a contribution under way is owed again."""

    def take_owed(self) -> OwedToLearner:
        """Return what to send now, and count it as sent."""

    def hear(self, told: ToContributor) -> None:
        """Take what the learner tells.

        Raises:
            StartupError: its terms cannot be kept. ConnectionLost: a group beyond the credits.
        """

    def lost(self) -> None:
        """Note that a stream was lost."""


class ContributeStream:
    """Streams to the learner, one after the other."""

    def __init__(self, channel: grpc.aio.Channel, account: Account, *, backoff: Backoff) -> None:
        """Prepare; nothing is dialled before ``run``."""
        self._stub = merge_pb2_grpc.MergeServiceStub(channel)
        self._account = account
        self._stream = LastingStream(
            self._stub.Contribute,
            hello=lambda: _hello(account.hello()),
            owed=self._owed,
            hear=self._hear,
            refused=_refused,
            lost=self._lost,
            backoff=backoff,
        )

    def wake(self) -> None:
        """Send what is owed by now."""
        self._stream.wake()

    async def run(self) -> None:
        """Receive and send until cancelled.

        Raises:
            RefusedError: for a reason that is final: another model than the run's.
            StartupError: the learner's terms cannot be kept.
        """
        await self._stream.run()

    async def say_goodbye(self, hello: ContributorHello) -> None:
        """Say which groups are held to the end; the stream has ended."""
        try:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                with classified():
                    call = self._stub.Contribute()
                    try:
                        await call.write(_hello(hello))
                        await call.read()  # the terms: it has read the hello
                    finally:
                        call.cancel()
        except (RefusedError, ConnectionLost, TimeoutError) as error:
            logger.info("the learner was not told what is given back", extra={"detail": str(error)})

    def _owed(self) -> Iterator[merge_pb2.ContributeRequest]:
        owed = self._account.take_owed()
        if owed.contribution is not None:
            yield from contribution_to_wire(owed.contribution)
        if owed.credit_groups:
            yield merge_pb2.ContributeRequest(credit=rollout_pb2.DrainCredit(groups=owed.credit_groups))

    def _hear(self, response: merge_pb2.ContributeResponse) -> None:
        if (told := told_from_wire(response)) is not None:
            self._account.hear(told)

    def _lost(self, lost: ConnectionLost) -> None:
        self._account.lost()
        logger.warning("connection to the learner lost", extra={"detail": str(lost)})


def _hello(hello: ContributorHello) -> merge_pb2.ContributeRequest:
    return merge_pb2.ContributeRequest(hello=to_wire(merge_pb2.ContributorHello, hello))


def _refused(refusal: RefusedError) -> AbstractContextManager[None]:
    if not refusal.reason.is_retryable:
        raise refusal
    logger.warning(
        "the learner refuses contributions now", extra={"reason": refusal.reason, "detail": str(refusal)}
    )
    return nullcontext()
