"""The hub that a peer speaks through: the first of its hubs, or the next one that answers.

    first --lost, away, refused--> next --...--> last --> first again
      ^                              |
      '-------after RETURN_S---------'

Where a refusal is final, the peer stops only once each of its hubs has refused it so: a relay's word alone
does not stop a sampler that knows another hub.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc.aio

RETURN_S: Final = 600.0
"""How long a peer stays with another hub before it tries the first one again."""


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub, and the channels to it."""

    control: grpc.aio.Channel
    rollouts: grpc.aio.Channel


class HubRoute:
    """Which hub it is now; changed by the peer's membership, followed by its leases and groups."""

    def __init__(self, hubs: Sequence[Hub], *, monotonic: Callable[[], float]) -> None:
        """Begin with the first of ``hubs``."""
        self._hubs = tuple(hubs)
        self._monotonic = monotonic
        self._place = 0
        self._refusals_in_a_row = 0
        self._since_s = monotonic()

    @classmethod
    def only(cls, channel: grpc.aio.Channel) -> "HubRoute":
        """Return a route to one hub over one channel."""
        return cls([Hub(channel, channel)], monotonic=lambda: 0.0)

    @property
    def hub(self) -> Hub:
        """The hub to call now."""
        return self._hubs[self._place]

    def works(self) -> None:
        """Note that the hub takes what the peer says."""
        self._refusals_in_a_row = 0

    def failed(self) -> None:
        """Go on to the next hub: this one is away, or cannot serve now."""
        self._place = (self._place + 1) % len(self._hubs)
        self._since_s = self._monotonic()

    def refused(self) -> bool:
        """Go on to the next hub after a final refusal; return False where all have refused."""
        self._refusals_in_a_row += 1
        self.failed()
        return self._refusals_in_a_row < len(self._hubs)

    def returns(self) -> bool:
        """Return whether it is time to try the first hub again, and go to it."""
        if not self._place or self._monotonic() - self._since_s < RETURN_S:
            return False
        self._place = 0
        self._since_s = self._monotonic()
        return True
