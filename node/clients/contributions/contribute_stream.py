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
from node.errors import Reason, RefusedError
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

    def refused(self, reason: Reason) -> None:
        """Note that a stream was refused, for now."""


ContributeStream = LastingStream[merge_pb2.ContributeRequest, merge_pb2.ContributeResponse]


def contribute_stream(channel: grpc.aio.Channel, account: Account, *, backoff: Backoff) -> ContributeStream:
    """Return the stream over which an account is kept.

    Its ``run`` raises RefusedError for a reason that is final, as another model than the run's, and what the
    account raises.
    """

    def owed() -> Iterator[merge_pb2.ContributeRequest]:
        now = account.take_owed()
        if now.contribution is not None:
            yield from contribution_to_wire(now.contribution)
        if now.credit_groups:
            yield merge_pb2.ContributeRequest(credit=rollout_pb2.DrainCredit(groups=now.credit_groups))

    def hear(response: merge_pb2.ContributeResponse) -> None:
        if (told := told_from_wire(response)) is not None:
            account.hear(told)

    def refused(refusal: RefusedError) -> AbstractContextManager[None]:
        if not refusal.reason.is_retryable:
            raise refusal
        account.refused(refusal.reason)
        about = {"reason": refusal.reason, "detail": str(refusal)}
        logger.warning("the learner refuses contributions now", extra=about)
        return nullcontext()

    def lost(lost: ConnectionLost) -> None:
        account.lost()
        logger.warning("connection to the learner lost", extra={"detail": str(lost)})

    return ContributeStream(
        merge_pb2_grpc.MergeServiceStub(channel).Contribute,
        hello=lambda: _hello(account.hello()),
        owed=owed,
        hear=hear,
        refused=refused,
        lost=lost,
        backoff=backoff,
    )


async def say_goodbye(channel: grpc.aio.Channel, hello: ContributorHello) -> None:
    """Say which groups are held to the end, on a stream of its own, once the last has ended."""
    try:
        async with asyncio.timeout(GOODBYE_LIMIT_S):
            with classified():
                call = merge_pb2_grpc.MergeServiceStub(channel).Contribute()
                try:
                    await call.write(_hello(hello))
                    await call.read()  # the terms: it has read the hello
                finally:
                    call.cancel()
    except (RefusedError, ConnectionLost, TimeoutError) as error:
        logger.info("the learner was not told what is given back", extra={"detail": str(error)})


def _hello(hello: ContributorHello) -> merge_pb2.ContributeRequest:
    return merge_pb2.ContributeRequest(hello=to_wire(merge_pb2.ContributorHello, hello))
