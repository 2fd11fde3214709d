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
        self.credits = 0
        self.acknowledgement: int | None = None
        """The newest version to acknowledge: its records are on disk."""
        self.has_quarantines = self.has_pardons = False
        """Whether the learner is to be told who is quarantined: there are new ones, or an operator has
        pardoned others."""
        self.has_orders = False
        """Whether the learner is to be told what operators order it."""
        self.is_ended = False
        self.refusal: RefusedError | None = None
        self._wake = asyncio.Event()

    def add_credits(self, groups: int) -> None:
        """Note room for more groups. Raises RefusedError: MALFORMED; no learner has so much room."""
        if not 0 < groups <= _CREDITS - self.credits:
            raise RefusedError(
                Reason.MALFORMED,
                f"a credit of {groups} groups on top of {self.credits}, at most {_CREDITS} are allowed",
            )
        self.credits += groups
        self.wake()

    def end(self, refusal: RefusedError | None = None) -> None:
        if not self.is_ended:
            self.is_ended, self.refusal = True, refusal
            self.wake()

    def wake(self) -> None:
        self._wake.set()

    async def wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()
