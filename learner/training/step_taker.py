"""Decides what becomes of a batch: a step, or none, and why.

batch --training state--> step, or one that teaches nothing --> step_records
            '-- not finite: skipped, its groups refused; three in a row end all
"""

import logging
from typing import Final

from learner.metrics import Instruments
from learner.training.completion import TrainingError
from learner.training.step_records import StepRecords
from learner.training.training_state import TrainingState
from learner.training.work_thread import WorkThread
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.values.groups.rollout import RolloutGroup

logger = logging.getLogger(__name__)

SKIPPED_STEPS_IN_A_ROW: Final = 3
"""One such batch is bad data; three of different groups mean a broken model or learning rate."""

Batch = tuple[RolloutGroup, ...]


class StepTaker:
    """Takes one batch after the other, from the event loop's thread."""

    def __init__(
        self,
        state: TrainingState,
        records: StepRecords,
        *,
        drain: RolloutDrain,
        thread: WorkThread,
        instruments: Instruments,
    ) -> None:
        """Work in ``thread``; ``records`` keep the steps."""
        self._state = state
        self._records = records
        self._drain = drain
        self._thread = thread
        self._metrics = instruments.metrics
        self._skipped_in_a_row = 0

    async def take(self, batch: Batch) -> None:
        """Train on a batch if it teaches something.

        Raises:
            TrainingError: the parameters, or three gradients in a row, were not finite.
        """
        unacknowledged, wait_s = self._drain.unacknowledged, self._records.groups_wait_s
        taken = await self._thread.do(
            lambda: self._state.take_step(batch, unacknowledged=unacknowledged, groups_wait_s=wait_s)
        )
        if taken is None:
            self._state.master_access.hold(self._state.version)
            self._skip(batch)
            return
        self._skipped_in_a_row = 0
        await self._records.keep(taken, batch)

    def _skip(self, batch: Batch) -> None:
        self._metrics.skipped_steps.inc()
        self._skipped_in_a_row += 1
        version, skipped = self._state.version, self._skipped_in_a_row
        logger.error("step skipped", extra={"version": version, "skipped_in_a_row": skipped})
        self._records.refuse(batch)
        if skipped == SKIPPED_STEPS_IN_A_ROW:
            raise TrainingError(
                f"{SKIPPED_STEPS_IN_A_ROW} gradients in a row were not finite; version {version} stays. "
                "Lower learner.learning_rate, or begin a new run from an older checkpoint"
            )
