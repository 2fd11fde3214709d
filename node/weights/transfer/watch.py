"""Watches the announcements of a hub."""

import logging
from collections.abc import AsyncGenerator, Callable

import grpc
import grpc.aio

from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.errors import RefusedError
from node.policy import Announcement
from node.rpc.channel import Backoff, ConnectionLost, classified
from node.wire.policies import announcement_from_wire

logger = logging.getLogger(__name__)


async def watch_versions(
    channel: grpc.aio.Channel, *, random: Callable[[], float], lost: Callable[[], None] = lambda: None
) -> AsyncGenerator[Announcement, None]:
    """Yield every announcement, the newest at once; reconnect for ever.

    Announcements are not signed: they say what to ask for, and its signed manifest is then verified. They
    come over a control channel, so that none waits behind weights; ``lost`` is called when it is cut.

    Raises:
        RefusedError: for a reason that is not retryable.
    """
    stub = policy_pb2_grpc.PolicyServiceStub(channel)
    backoff = Backoff(random)
    while True:
        call = stub.WatchVersions(policy_pb2.WatchVersionsRequest())
        try:
            with classified():
                async for message in call:
                    backoff.reset()
                    yield announcement_from_wire(message)
        except ConnectionLost as error:
            logger.debug("the announcements were cut", extra={"error": str(error)})
        except RefusedError as error:
            if not error.reason.is_retryable:
                raise
            logger.info("the hub does not announce now", extra={"reason": error.reason, "error": str(error)})
        finally:
            call.cancel()
        lost()
        await backoff.wait()
