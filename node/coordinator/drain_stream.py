"""The coordinator's side of one open DrainRollouts stream: how much may be sent, and what is to be told."""

import asyncio
from typing import Final

from node.errors import Reason, RefusedError

_CREDITS: Final = 1 << 20
"""Room no learner has; a larger sum is a mistake or an attack."""


class DrainStream:
    """One stream to a learner; the spool delivers on it until it ends."""

    def __init__(self, *, learner_epoch: int) -> None:
        self.learner_epoch = learner_epoch
        self._credits = 0
        self._acknowledgement: int | None = None
        self._refusal: RefusedError | None = None
        self._pardons = False
        self._wake = asyncio.Event()
        self.is_ended = False

    def add_credits(self, groups: int) -> None:
        """Note room for more groups.

        Raises:
            RefusedError: MALFORMED; no learner has so much room.
        """
        if not 0 < groups <= _CREDITS - self._credits:
            raise RefusedError(
                Reason.MALFORMED,
                f"a credit of {groups} groups on top of {self._credits}, at most {_CREDITS} are allowed",
            )
        self._credits += groups
        self.wake()

    def acknowledge(self, version: int) -> None:
        """Acknowledge the records up to ``version``, which are on disk."""
        self._acknowledgement = version
        self.wake()

    def pardon(self) -> None:
        """Tell the learner who is quarantined, now that an operator has pardoned others."""
        self._pardons = True
        self.wake()

    def take_pardons(self) -> bool:
        """Return whether somebody was pardoned since the last time."""
        pardons, self._pardons = self._pardons, False
        return pardons

    def end(self, refusal: RefusedError | None = None) -> None:
        """End the stream, with a ``refusal`` for the learner if there is one."""
        if not self.is_ended:
            self.is_ended, self._refusal = True, refusal
            self.wake()

    def wake(self) -> None:
        """Look again for something to send."""
        self._wake.set()

    async def wait(self) -> None:
        """Wait until there may be something to send."""
        await self._wake.wait()
        self._wake.clear()

    def take_refusal(self) -> RefusedError | None:
        """Return why the stream was ended, once."""
        refusal, self._refusal = self._refusal, None
        return refusal

    def take_acknowledgement(self) -> int | None:
        """Return the newest version to acknowledge, once; None: none."""
        version, self._acknowledgement = self._acknowledgement, None
        return version

    @property
    def has_credit(self) -> bool:
        """Whether the learner has room for a group."""
        return self._credits > 0

    def take_credit(self) -> None:
        """Count a group as sent."""
        self._credits -= 1

    def put_back_credit(self) -> None:
        """Return the credit of a group that could not be sent after all."""
        self._credits += 1
