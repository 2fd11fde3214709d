"""Decodes payloads in threads while the next are asked for and read.

    begin()   returns at once while few are being decoded, so that a lane reads on; then waits for the oldest
    look()    raises what one of them has raised
    end()     returns when all have ended

A payload that fails its digest goes back to the transfer, to be fetched from another source.
"""

import asyncio
import logging
import os
from collections import deque
from typing import Final

from node.errors import RefusedError
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.assembly.apply import DamagedFrameError
from node.weights.transfer.ranges import Arrived, PutFrame, Range, Transfer
from node.weights.transfer.source_scores import Fault
from node.weights.transfer.sources import Sources

logger = logging.getLogger(__name__)

_MOST: Final = min(4, os.cpu_count() or 1)
"""Messages of one lane being decoded at a time; one more waits."""


class NotTakenError(Exception):
    """The receiver of a frame refused it; no source is to blame."""

    def __init__(self, refusal: RefusedError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class DecodeQueue:
    """What one lane has read and not yet decoded."""

    def __init__(
        self, transfer: Transfer, *, sources: Sources, metrics: TransferMetrics, most_attempts: int
    ) -> None:
        """Hand payloads to ``transfer.put``; give up when one frame was damaged ``most_attempts`` times."""
        self._transfer = transfer
        self._sources = sources
        self._metrics = metrics
        self._most_attempts = most_attempts
        self._under_way: deque[asyncio.Task[None]] = deque()

    async def begin(self, arrived: list[Arrived]) -> None:
        """Begin to decode frames, beside a few others.

        Raises:
            DamagedFrameError: a frame that was begun earlier was damaged too often.
            NotTakenError: the receiver refused one.
        """
        self._transfer.decoding += 1
        self._under_way.append(asyncio.create_task(self._decode(arrived)))
        if len(self._under_way) > _MOST:
            # Not awaited itself: a cancelled lane would cancel it, and its thread would outlive ``end``.
            await asyncio.wait({self._under_way[0]})
            self.look()

    def look(self) -> None:
        """Forget the tasks that have ended. Raises DamagedFrameError, NotTakenError: as ``begin``."""
        ended = [task for task in self._under_way if task.done()]
        for task in ended:
            self._under_way.remove(task)
        for task in ended:
            task.result()

    async def end(self) -> None:
        """Wait until nothing is being decoded; ignore what was raised."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _decode(self, arrived: list[Arrived]) -> None:
        try:
            await self._put(arrived)
        finally:
            self._transfer.decoded()

    async def _put(self, arrived: list[Arrived]) -> None:
        try:
            damaged = await asyncio.to_thread(_put_all, self._transfer.put, arrived)
        except RefusedError as error:
            raise NotTakenError(error) from error
        for each, fault in damaged:
            frame = each.frame
            self._metrics.count_damaged_frame()
            self._transfer.damaged[frame] += 1
            logger.warning(
                "a frame arrived damaged",
                extra={"version": self._transfer.key.version, "frame": frame, "error": str(fault)},
            )
            if len(each.senders) == 1:
                (sender,) = each.senders
                self._sources.fault(sender, Fault.DAMAGED, str(fault))
            if self._transfer.damaged[frame] >= self._most_attempts:
                raise fault
            self._transfer.give_back(Range(deque([frame]), avoid=each.senders))


def _put_all(put: PutFrame, arrived: list[Arrived]) -> list[tuple[Arrived, DamagedFrameError]]:
    """Put every frame; return those that are damaged."""
    damaged = []
    for each in arrived:
        try:
            put(each.frame, each.payload)
        except DamagedFrameError as error:
            damaged.append((each, error))
    return damaged
