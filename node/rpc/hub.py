"""The run's coordinators as a peer knows them: some addresses, one of which it takes for the leader's.

Whoever joins the run moves on from one that cannot be reached, stands by or drains; every channel that was
dialled to the hub begins its next call where the hub is then.
"""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from node.errors import HeteroRLError, Reason, RefusedError
from node.rpc.address import split_targets


class Hub:
    """One or more addresses; used on the event loop's thread."""

    def __init__(self, addresses: str) -> None:
        """Take ``host:port``, or several with commas between. Raises ValueError: one cannot be dialled."""
        self.addresses = split_targets(addresses)
        self.address = self.addresses[0]
        """The one that is dialled now."""
        self.moves = 0

    def __str__(self) -> str:
        return ",".join(self.addresses)

    def move_on_after(self, error: HeteroRLError) -> None:
        """Take the next address for the leader's, unless the one here refused for a reason of its own."""
        if isinstance(error, RefusedError) and error.reason not in (Reason.STANDBY, Reason.DRAINING):
            return
        place = self.addresses.index(self.address)
        self.address = self.addresses[(place + 1) % len(self.addresses)]
        self.moves += 1


class HubChannel(grpc.aio.Channel):
    """A channel to wherever the hub is when a call begins; calls that have begun stay where they are.

    Each move dials anew: a channel that could not connect for a while fails calls until it tries again.
    """

    def __init__(self, hub: Hub, dial: Callable[[str], grpc.aio.Channel]) -> None:
        self._hub = hub
        self._dial = dial
        self._moves = hub.moves
        self._channel = dial(hub.address)

    @property
    def current(self) -> grpc.aio.Channel:
        """The channel to the address that the hub is at."""
        if self._moves != self._hub.moves:
            self._moves, self._channel = self._hub.moves, self._dial(self._hub.address)
        return self._channel

    async def __aenter__(self) -> "HubChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current.channel_ready()

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        return lambda *call, **options: self.current.unary_unary(*method, **how)(*call, **options)

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        return lambda *call, **options: self.current.unary_stream(*method, **how)(*call, **options)

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        return lambda *call, **options: self.current.stream_unary(*method, **how)(*call, **options)

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        return lambda *call, **options: self.current.stream_stream(*method, **how)(*call, **options)
