"""Runs step writers in a thread of their own: training never waits for one and never fails with one.

    training loop --offer--> queue of QUEUED_STEPS --> thread --> samples, TensorBoard, Weights & Biases
                                '-- full: the step is dropped, and counted

Every outcome is counted. A writer that fails is asked again at the next step.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from learner.metrics import LearnerMetrics
from learner.step_log import StepLine
from node.rollout import DeliveredGroup

logger = logging.getLogger(__name__)

QUEUED_STEPS: Final = 4
"""Steps whose groups may wait in memory for a slow disk."""

CLOSE_S: Final = 10.0
"""Longest wait at the end for what is queued and for writers to flush; below a daemon's time to drain."""


class StepWriter(Protocol):
    """Something that writes down a step for people; called from one thread."""

    @property
    def name(self) -> str:
        """Label of its counters."""
        ...

    def write(self, line: StepLine, batch: Sequence[DeliveredGroup]) -> None:
        """Write down a step and the groups that it consumed. May raise anything."""
        ...

    def close(self) -> None:
        """Flush. May raise anything."""
        ...


class _Step(NamedTuple):
    line: StepLine
    batch: Sequence[DeliveredGroup]


class WriterThread:
    """A service that owns the writers."""

    name = "step writers"

    def __init__(self, writers: Sequence[StepWriter], *, metrics: LearnerMetrics) -> None:
        self._writers = writers
        self._metrics = metrics
        self._queue: queue.Queue[_Step | None] = queue.Queue(QUEUED_STEPS)
        self._failing: set[str] = set()

    def offer(self, line: StepLine, batch: Sequence[DeliveredGroup]) -> None:
        """Have a step written down, unless too many wait already. Never blocks."""
        try:
            self._queue.put_nowait(_Step(line, batch))
        except queue.Full:
            for writer in self._writers:
                self._count(writer, "dropped")

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Write until ``stopping``, then what is queued, for CLOSE_S at most."""
        # A daemon thread: a tracker that waits for its server cannot keep the process from ending.
        thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        thread.start()
        ready()
        await stopping.wait()
        await asyncio.to_thread(self._finish, thread)
        if thread.is_alive():
            logger.warning("step writers are late", extra={"waited_s": CLOSE_S})

    def _finish(self, thread: threading.Thread) -> None:
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        thread.join(CLOSE_S)

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            for writer in self._writers:
                self._count(writer, self._outcome(writer, partial(writer.write, *step)))
        for writer in self._writers:
            self._outcome(writer, writer.close)

    def _outcome(self, writer: StepWriter, call: Callable[[], None]) -> str:
        try:
            call()
        except Exception as error:  # of any kind: trackers are libraries, and training goes on
            if writer.name not in self._failing:
                self._failing.add(writer.name)
                what = f"{type(error).__name__}: {error}"
                logger.warning("step writer failed", extra={"writer": writer.name, "error": what})
            return "failed"
        if writer.name in self._failing:
            self._failing.discard(writer.name)
            logger.info("step writer works again", extra={"writer": writer.name})
        return "written"

    def _count(self, writer: StepWriter, outcome: str) -> None:
        self._metrics.step_writes.labels(writer.name, outcome).inc()
