"""The addresses at which a peer reaches the coordinator: its relays', in their order, then coordinators' own.

Behind each a coordinator answers, and one of several leads. Whoever joins the run moves on from an address
where none answers, or where the one there stands by or drains; every channel that was dialled to the hub
begins its next call where the hub is then. Calls that have begun stay where they are, unless the hub gave no
answer: each would wait until its own pings find that out, for half a minute, while other peers work with the
next coordinator.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from node.errors import HeteroRLError, Reason, RefusedError
from node.rpc.address import split_targets


class Hub:
    """One or more addresses; used on the event loop's thread."""

    def __init__(self, addresses: str, *, relays: Sequence[str] = ()) -> None:
        """Take ``host:port`` of coordinators, with commas between; empty where all are reached by ``relays``.

        Raises ValueError: one cannot be dialled.
        """
        coordinators = split_targets(addresses) if addresses or not relays else ()
        self.addresses = tuple(dict.fromkeys((*relays, *coordinators)))
        self.address = self.addresses[0]
        """The one that is dialled now."""
        self.moves = 0
        self._relays = frozenset(relays)
        self._coordinators = coordinators
        self._listeners: list[Callable[[], None]] = []
        self._channels: weakref.WeakSet[HubChannel] = weakref.WeakSet()

    def __str__(self) -> str:
        return ",".join(self.addresses)

    def move_on_after(self, error: HeteroRLError) -> None:
        """Take the next address, unless the hub here refused for a reason that another one has, too.

        Where there is no other, the channels that are there go on: a connection takes three round trips, and
        one that is under way over a long line is not begun again.
        """
        if len(self.addresses) == 1:
            return
        if isinstance(error, RefusedError) and error.reason not in (Reason.STANDBY, Reason.DRAINING):
            return
        place = self.addresses.index(self.address)
        self.address = self.addresses[(place + 1) % len(self.addresses)]
        self.moves += 1
        if not isinstance(error, RefusedError):
            for channel in tuple(self._channels):
                channel.end_calls()
        for listener in self._listeners:
            listener()

    def watch(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever another address is dialled from then on."""
        self._listeners.append(listener)

    def add_channel(self, channel: "HubChannel") -> None:
        """End the calls of a channel where the hub that they are at gives no answer."""
        self._channels.add(channel)

    def learn(self, coordinators: Sequence[str]) -> None:
        """Dial these addresses before the configured coordinators, from the next move on.

        Where nothing was dialled yet, from the start; where only relays are configured, never.
        """
        if not self._coordinators:
            return
        relays = [address for address in self.addresses if address in self._relays]
        known = list(self._coordinators)
        if self._channels:  # from the last one on, the next move leads to the first
            known = [*(address for address in known if address != self.address), self.address]
        self.addresses = tuple(dict.fromkeys((*relays, *coordinators, *known)))
        if not self._channels:
            self.address = self.addresses[0]


class HubChannel(grpc.aio.Channel):
    """A channel to wherever the hub is when a call begins.

    Each move dials anew: a channel that could not connect for a while fails calls until it tries again. So
    does a renewal: a channel keeps the certificate that it was made with.
    """

    def __init__(
        self, hub: Hub, dial: Callable[[str], grpc.aio.Channel], *, renewals: Callable[[], int] = lambda: 0
    ) -> None:
        """Dial an address; again after each move, and when ``renewals``, of the caller's identity, grows."""
        self._hub = hub
        self._dial = dial
        self._renewals = renewals
        self._dialled_at = (hub.moves, renewals())
        self._channel = dial(hub.address)
        self._calls: weakref.WeakSet[grpc.aio.Call] = weakref.WeakSet()
        hub.add_channel(self)

    def end_calls(self) -> None:
        """End all calls; ``classified`` says to whoever waits for one that the connection is lost."""
        calls, self._calls = self._calls, weakref.WeakSet()
        for call in calls:
            call.cancel()

    @property
    def current(self) -> grpc.aio.Channel:
        """The channel to the address that the hub is at, by the caller's certificate of now."""
        if self._dialled_at != (now := (self._hub.moves, self._renewals())):
            self._dialled_at, self._channel = now, self._dial(self._hub.address)
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
        return self._callable("unary_unary", method, how)

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        return self._callable("unary_stream", method, how)

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        return self._callable("stream_unary", method, how)

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        return self._callable("stream_stream", method, how)

    def _callable(self, kind: str, method: Sequence[Any], how: dict[str, Any]) -> Callable[..., Any]:
        def begin(*request: Any, **options: Any) -> Any:
            call = getattr(self.current, kind)(*method, **how)(*request, **options)
            self._calls.add(call)
            return call

        return begin
