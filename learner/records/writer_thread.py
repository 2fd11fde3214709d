"""Runs a step writer in a thread of its own: training never waits for it and never fails with it.

    training loop --offer--> queue of QUEUED_STEPS --> thread --> samples, TensorBoard or Weights & Biases
                                '-- full: the step is dropped

Every outcome is counted. A writer that fails is asked again at the next step.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from learner.metrics import LearnerMetrics
from learner.step_log import StepLine
from node.values.groups.rollout import RolloutGroup

logger = logging.getLogger(__name__)

QUEUED_STEPS: Final = 256
"""Steps that wait for a tracker's server; of each there are some numbers in memory, or a few groups."""

CLOSE_S: Final = 10.0
"""Longest wait at the end for what is queued and for a flush; below a daemon's time to drain."""


class StepWriter(Protocol):
    """Something that writes down steps for people."""

    @property
    def name(self) -> str:
        """Label of its counters."""
        ...

    def write_of(self, line: StepLine | None, batch: Sequence[RolloutGroup]) -> Callable[[], None] | None:
        """Return the write of a step and of the groups that it consumed; None: it is not written down.

        Without a line the groups were admitted before the first step. Cheap, on the event loop; the write is
        called in the writer's thread and may raise anything.
        """
        ...

    def close(self) -> None:
        """Flush, in the writer's thread. May raise anything."""
        ...


class WriterThread:
    """A service that owns a writer."""

    def __init__(self, writer: StepWriter, *, metrics: LearnerMetrics) -> None:
        self.name = f"writer of {writer.name}"
        self._writer = writer
        self._metrics = metrics
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUED_STEPS)
        self._is_failing = False

    def offer(self, line: StepLine | None, batch: Sequence[RolloutGroup]) -> None:
        """Queue a step for writing, unless too many wait already. Never blocks."""
        write = self._writer.write_of(line, batch)
        if write is None:
            return
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            self._count("dropped")

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Write until ``stopping``, then what is queued, for CLOSE_S at most."""
        # A daemon thread: a tracker that waits for its server cannot keep the process from ending.
        thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        thread.start()
        ready()
        await stopping.wait()
        await asyncio.to_thread(self._finish, thread)
        if thread.is_alive():
            logger.warning("step writer is late", extra={"writer": self._writer.name, "waited_s": CLOSE_S})

    def _finish(self, thread: threading.Thread) -> None:
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        thread.join(CLOSE_S)

    def _work(self) -> None:
        while (write := self._queue.get()) is not None:
            self._count(self._outcome(write))
        self._outcome(self._writer.close)

    def _outcome(self, call: Callable[[], None]) -> str:
        was_failing, self._is_failing = self._is_failing, False
        try:
            call()
        except Exception as error:  # of any kind: trackers are libraries, and training goes on
            self._is_failing = True
            if not was_failing:
                what = f"{type(error).__name__}: {error}"
                logger.warning("step writer failed", extra={"writer": self._writer.name, "error": what})
            return "failed"
        if was_failing:
            logger.info("step writer works again", extra={"writer": self._writer.name})
        return "written"

    def _count(self, outcome: str) -> None:
        self._metrics.step_writes.labels(self._writer.name, outcome).inc()
