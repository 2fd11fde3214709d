"""The coordinator's part of the live page: the state of the run, and curves of its newest steps.

upkeep                        --> note      --> the newest steps
threads of the telemetry port --> sections  --> one look on the event loop, which owns what it reads
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final

from node.coordinator.run_status import RunReport
from node.page.run_sections import RunView, run_sections
from node.page.section import Section
from node.page.step_curves import StepCurves
from node.run import PeerQuery, RunStatus, StepReport

PEERS_SHOWN: Final = 50
STEPS_SHOWN: Final = 500

LOOK_S: Final = 2.0
"""Patience with an event loop that is busy, by one thread; others show the page before meanwhile."""


class LiveStatus:
    """The state of one run, for the threads that render pages."""

    def __init__(self, report: RunReport, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare; ``loop`` is the one that ``report`` may be asked on."""
        self._report = report
        self._loop = loop
        self._steps: deque[StepReport] = deque(maxlen=STEPS_SHOWN)

    def note(self, step: StepReport | None) -> None:
        """Keep a step for the curves, unless it is known."""
        if step is not None and (not self._steps or self._steps[-1].version != step.version):
            self._steps.append(step)

    def sections(self) -> Iterator[Section]:
        """Return the sections. Any thread but the loop's.

        Raises TimeoutError: the event loop did not answer in LOOK_S.
        """
        look = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        try:
            status, steps = look.result(timeout=LOOK_S)
        finally:
            look.cancel()
        return run_sections(RunView.live(status, StepCurves.of_reports(steps)))

    async def _look(self) -> tuple[RunStatus, tuple[StepReport, ...]]:
        self.note(self._report.table.peers.step)
        return self._report.status(PeerQuery(sort_by="state", limit=PEERS_SHOWN)), tuple(self._steps)
