"""Carries out what operators ask of a running learner, between two of its steps.

    rollback   masters of the earlier version --> a checkpoint of the next one --> record, line, publication
    setting    configuration with other values --> the following steps, whose entries in the journal have them

A rollback needs no entry in the journal: its checkpoint is there whole or not at all, and the journal goes on
behind it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from learner.config import LearnerConfig
from learner.metrics import Instruments
from learner.operator_orders import (
    OperatorOrders,
    RollbackOrder,
    Settings,
    VersionGoneError,
    with_settings,
)
from learner.step_log import StepLog
from learner.training.checkpoint_writer import CheckpointWriter
from learner.training.training_state import TrainingState
from node.clients.rollout_drain import RolloutDrain
from node.errors import StartupError

logger = logging.getLogger(__name__)

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work in the training thread."""


class VersionStager(Protocol):
    """The versions that a learner's state directory has, see ``learner.publishing.earlier_versions``."""

    def stage(self, version: int) -> Path:
        """Write a version's masters into a directory; return it.

        Raises:
            VersionGoneError: it cannot be had.
        """
        ...

    def clear(self) -> None:
        """Remove the directory."""
        ...


class OrderTaker:
    """Called from the training loop, which takes no step meanwhile."""

    def __init__(
        self,
        orders: OperatorOrders,
        earlier: VersionStager,
        *,
        config: LearnerConfig,
        state: TrainingState,
        drain: RolloutDrain,
        step_log: StepLog,
        instruments: Instruments,
    ) -> None:
        """Heed ``orders``; ``config`` has its own values, without those that they set."""
        self._orders, self._earlier = orders, earlier
        self._config = config
        self._state = state
        self._drain = drain
        self._step_log = step_log
        self._disk_wait = instruments.disk_wait
        self._metrics = instruments.metrics
        self._node_metrics = instruments.node_metrics
        self._heeded: Settings = {}
        """As they were read last, whether they could be taken or not."""

    async def take_settings(self, in_thread: InThread) -> None:
        """Take the following steps with the settings that hold now."""
        settings = self._orders.settings()
        if settings == self._heeded:
            return
        self._heeded = settings
        values = {key: one.value for key, one in settings.items()}
        try:
            config = with_settings(self._config, settings)
            await in_thread(lambda: self._state.adopt(config))
        except (ValueError, StartupError) as error:
            logger.error("settings refused", extra={"values": values, "detail": str(error)})
            return
        logger.warning("settings of an operator hold", extra={"values": values})

    def due_rollback(self) -> RollbackOrder | None:
        """Return the rollback to carry out now; None: there is none."""
        order = self._orders.rollback(self._state.progress)
        if order is None or 0 <= order.version < self._state.version:
            return order
        self._orders.refuse(order, f"the newest version is {self._state.version}: name an older one")
        return None

    async def roll_back(
        self,
        order: RollbackOrder,
        in_thread: InThread,
        checkpoints: CheckpointWriter,
        stopping: asyncio.Event,
    ) -> None:
        """Make the next version of an earlier one's weights; nobody hears of it before it is durable.

        Args:
            checkpoints: free.
        Raises:
            OSError, ValueError: what was staged cannot be read back. The next start is at the version before.
        """
        try:
            masters = await in_thread(lambda: self._earlier.stage(order.version))
        except VersionGoneError as gone:
            self._orders.refuse(order, str(gone))
            return
        unacknowledged = self._drain.unacknowledged
        copied = await in_thread(lambda: self._state.roll_back(order, masters, unacknowledged=unacknowledged))
        await in_thread(self._earlier.clear)
        checkpoints.begin(copied, stopping)
        with self._node_metrics.waiting("checkpoint"):
            if not await checkpoints.end():
                return  # stopped while the disk was full: the order stands at the next start
        self._drain.record(await in_thread(lambda: self._state.rolled_back(copied)))
        self._state.master_access.hold(self._state.version)
        fields = {"restored_version": order.version, "because": order.because}
        logger.warning("rolled back", extra={"version": self._state.version, **fields})
        self._metrics.version.set(self._state.version)
        self._metrics.rollbacks.inc()
        line = self._state.progress.step
        assert line is not None
        await self._disk_wait.until_written(
            f"the line of version {self._state.version}",
            lambda: in_thread(lambda: self._step_log.append(line)),
            stopping=stopping,
        )
