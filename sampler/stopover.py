"""Where a sampler stays at a version because it is evaluated; pure.

    passing by --arrives at the version it was told of, or is leased prompts of its own--> stopped
        ^                                                                                     |
        '-- asked for leases with none left to generate, and got none for evaluation; or waited too long

Staying costs little: the sampler goes on with training prompts at that version, and with newer versions when
its held-out prompts are generated. Without it no version of a fast run would ever be evaluated as such.
"""

from collections.abc import Callable, Iterable
from typing import Final

from node.rollout import PromptLease

LONGEST_STOP_S: Final = 30.0
"""Longest stay without a prompt to generate: the hub is away, or has no room for a request."""


class Stopover:
    """For the event loop's thread; ``now`` is monotonic, seconds.

    Attributes:
        from_version: Stop at the first version from here on; None: pass all by.
    """

    def __init__(
        self,
        *,
        is_generating: Callable[[int], bool],
        arrived: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        """Begin without a stop.

        Args:
            is_generating: Returns whether there are leases that only this version may answer.
            arrived: Called when a stop begins: leases are to be asked for.
            left: Called when a stop has ended.
        """
        self._is_generating = is_generating
        self._arrived = arrived
        self._left = left
        self._version: int | None = None
        self._since_s = 0.0
        self._newest = 0
        self.from_version: int | None = None

    def arrive(self, version: int, *, now: float) -> None:
        """Note that ``version`` is held from now on.

        A version older than one held before is no place to stop: the cheapest way to the head may lead back
        through it, and it is not sampled from.
        """
        if self.from_version is not None and self._newest < self.from_version <= version:
            self._version, self._since_s = version, now
            self._arrived()
        self._newest = max(self._newest, version)

    def holds(self, version: int, *, now: float) -> bool:
        """Whether the sampler is to stay at the version that it holds."""
        if version != self._version:
            return False
        return self._is_generating(version) or now - self._since_s < LONGEST_STOP_S

    def has_to_ask(self, version: int) -> bool:
        """Whether it has to ask for leases now, with or without room for them."""
        return version == self._version and not self._is_generating(version)

    def answered(
        self,
        version: int,
        leases: Iterable[PromptLease],
        *,
        from_version: int | None,
        had_to_ask: bool,
        now: float,
    ) -> None:
        """Note the answer to a request for leases that was made at ``version``."""
        self.from_version = from_version
        if any(lease.policy_version == version for lease in leases):
            self._version, self._since_s = version, now
        elif had_to_ask and version == self._version:
            self._version = None
            self._left()
