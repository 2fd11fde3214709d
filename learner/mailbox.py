"""From training to publishing: room for one snapshot, newest wins.

Training never waits here, and memory is bounded by what is in use at once: the version last
published, the one being coded, the one waiting, the one being written.
"""

import asyncio
from dataclasses import dataclass

import numpy as np

from node.weights.digests import Words


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One version as it is to be published."""

    version: int
    words: Words
    taken_at_s: float
    """On the monotonic clock."""


class SnapshotMailbox:
    """Used from the event loop's thread. Arrays go round: whoever takes one hands it on or gives it back."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._blanks: list[Words] = []
        self._waiting: Snapshot | None = None
        self._filled = asyncio.Event()
        self._superseded = 0

    def blank(self) -> Words:
        """Give an array of the layout's size with anything in it."""
        return self._blanks.pop() if self._blanks else np.empty(self._words, np.uint16)

    def give_back(self, words: Words) -> None:
        """Say that an array is no longer used."""
        self._blanks.append(words)

    def put(self, snapshot: Snapshot) -> None:
        """Leave a snapshot; one that is still waiting is dropped."""
        if self._waiting is not None:
            self._superseded += 1
            self.give_back(self._waiting.words)
        self._waiting = snapshot
        self._filled.set()

    @property
    def is_filled(self) -> bool:
        """Whether a snapshot waits; may be asked from any thread."""
        return self._waiting is not None

    def take(self) -> Snapshot | None:
        """Take the waiting snapshot, if there is one."""
        snapshot, self._waiting = self._waiting, None
        self._filled.clear()
        return snapshot

    def take_superseded(self) -> int:
        """Give how many snapshots were dropped for a newer one since this was asked last."""
        superseded, self._superseded = self._superseded, 0
        return superseded

    async def wait_for_snapshot(self) -> None:
        """Wait until there is one to take."""
        await self._filled.wait()
