"""Writes checkpoints beside training, one at a time."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from learner.journal.checkpoint import CheckpointCopy
from learner.metrics import Instruments
from learner.training.training_state import TrainingState
from node.system.waits import drop

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """The checkpoint that is being written, if there is one. Call it from the event loop."""

    def __init__(self, state: TrainingState, instruments: Instruments) -> None:
        self._state = state
        self._clock = instruments.clock
        self._metrics = instruments.metrics
        self._disk_wait = instruments.disk_wait
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: asyncio.Task[bool] | None = None

    @property
    def is_free(self) -> bool:
        """Whether ``begin`` may be called."""
        return self._writing is None

    @property
    def is_written(self) -> bool:
        """Whether ``end`` would not wait."""
        return self._writing is not None and self._writing.done()

    def begin(self, copied: CheckpointCopy, stopping: asyncio.Event) -> None:
        """Write a checkpoint for as long as it takes; until ``stopping``, also wait for room on the disk."""
        self._writing = asyncio.create_task(self._write(copied, stopping))

    async def end(self) -> bool:
        """Wait until the checkpoint is on disk; False if the learner was stopped before.

        Raises:
            OSError: it failed for a reason that room on the disk does not change.
        """
        writing, self._writing = self._writing, None
        return writing is None or await writing

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._writing is not None:
            drop(self._writing)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _write(self, copied: CheckpointCopy, stopping: asyncio.Event) -> bool:
        version, started_s = copied.progress.version, self._clock.monotonic()

        async def write() -> int:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._state.write(copied)
            )

        size_bytes = await self._disk_wait.until_written(
            f"the checkpoint of version {version}", write, stopping=stopping
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
