"""Decides with the rules of ``journal.restart`` when a checkpoint is begun, and writes it beside training.

between two steps: due? --copy, in the training thread--> written in a thread of its own --> journal cut
"""

import asyncio
import logging

from learner.journal.checkpoint import CheckpointCopy
from learner.journal.checkpoint_rules import Due
from learner.metrics import Instruments
from learner.training.training_state import TrainingState
from learner.training.work_thread import WorkThread
from node.system.waits import drop

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """The checkpoint that is being written, if there is one. Call it from the event loop."""

    def __init__(
        self, state: TrainingState, instruments: Instruments, *, training: WorkThread, stopping: asyncio.Event
    ) -> None:
        """Copy ``state`` in its thread, ``training``; until ``stopping``, wait for room on the disk."""
        self._state = state
        self._training = training
        self._thread = WorkThread("checkpoint", instruments.disk_wait, stopping=stopping)
        self._clock = instruments.clock
        self._metrics = instruments.metrics
        self._node_metrics = instruments.node_metrics
        self._writing: asyncio.Task[bool] | None = None

    async def begin_if_due(self) -> None:
        """Begin a checkpoint if one is due and none is being written; let training wait where it must."""
        due = self._state.checkpoint_due()
        is_written = self._writing is not None and self._writing.done()
        if is_written or due is Due.NOW:
            await self.end()
        if due is not Due.NOT and self._writing is None:
            started_s = self._clock.monotonic()
            self.begin(await self._training.do(self._state.copy))
            self._metrics.checkpoint_copy_seconds.observe(self._clock.monotonic() - started_s)
            if due is Due.NOW:
                await self.end()
        self._metrics.journal_bytes.set(self._state.history.journal_bytes)

    async def write_last(self) -> None:
        """Write a checkpoint of the newest step, unless there is one; a full disk is not waited for."""
        await self.end()
        if self._state.has_new_steps:
            self.begin(await self._training.do(self._state.copy))
            await self.end()

    def begin(self, copied: CheckpointCopy) -> None:
        """Write a checkpoint for as long as it takes. None may be being written: ``end`` it first."""
        self._writing = asyncio.create_task(self._write(copied))

    async def end(self) -> bool:
        """Wait until no checkpoint is being written; False if the learner was stopped before one was on disk.

        Raises:
            OSError: it failed for a reason that room on the disk does not change.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return True
        with self._node_metrics.waiting("checkpoint"):
            if is_on_disk := await writing:
                await self._training.do(self._state.history.cut_journal)
        return is_on_disk

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._writing is not None:
            drop(self._writing)
        self._thread.close()

    async def _write(self, copied: CheckpointCopy) -> bool:
        version, started_s = copied.progress.version, self._clock.monotonic()
        size_bytes = await self._thread.until_written(
            f"the checkpoint of version {version}", lambda: self._state.history.write(copied)
        )
        if size_bytes is None:
            return False
        took_s = self._clock.monotonic() - started_s
        self._metrics.checkpoint_seconds.observe(took_s)
        self._metrics.checkpoint_written_bytes.inc(size_bytes)
        self._metrics.checkpoint_version.set(version)
        fields = {"version": version, "size_bytes": size_bytes, "took_s": round(took_s, 3)}
        logger.info("checkpoint written", extra=fields)
        return True
