"""Carries out what operators ask of a running learner, between two of its steps.

    rollback   masters of the earlier version --> a checkpoint of the next one --> record, line, publication
    setting    configuration with other values --> the following steps, whose entries in the journal have them

A rollback needs no entry in the journal: its checkpoint is there whole or not at all, and the journal goes on
behind it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.metrics import Instruments
from learner.operator_orders import (
    RollbackOrder,
    VersionGoneError,
    asked_rollback,
    asked_settings,
    known_settings,
    rollback_of,
    with_order,
    with_settings,
)
from learner.step_log import StepLog
from learner.training.checkpoint_writer import CheckpointWriter
from learner.training.training_state import TrainingState
from node.clients.rollout_drain import RolloutDrain
from node.errors import StartupError
from node.values.operator_order import Order, OrderAnswer

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
        earlier: VersionStager,
        *,
        config: LearnerConfig,
        state: TrainingState,
        drain: RolloutDrain,
        step_log: StepLog,
        instruments: Instruments,
    ) -> None:
        """Heed the orders that come with ``drain``; ``config`` has the learner's own values."""
        self._earlier = earlier
        self._config = config
        self._state = state
        self._drain = drain
        self._step_log = step_log
        self._disk_wait = instruments.disk_wait
        self._metrics = instruments.metrics
        self._node_metrics = instruments.node_metrics
        self._heeded: tuple[Order, ...] = ()
        """As they were told last."""

    async def take(self, in_thread: InThread) -> RollbackOrder | None:
        """Take the following steps with the settings that hold now; return the rollback to carry out, or
        None."""
        if (told := self._drain.orders) is self._heeded:
            return None
        self._heeded = told
        await self._take_settings(told, in_thread)
        order = asked_rollback(told)
        if order is None:
            return None
        done = self._state.progress.rollback
        if done is not None and done.order == order.order_id:
            self._answer(order, f"version {done.version} has the weights of version {done.restored_version}")
            return None
        try:
            return rollback_of(order, self._state.progress)
        except ValueError as why:
            self._refuse(order, why)
            return None

    async def _take_settings(self, told: tuple[Order, ...], in_thread: InThread) -> None:
        """Take the settings that held before, then those that are asked for, one by one."""
        settings: dict[str, Any] = {}
        for key, value in known_settings(told).items():
            try:
                await self._adopt(settings | {key: value}, in_thread)
                settings[key] = value
            except (ValueError, StartupError) as error:  # the configuration has changed since
                logger.error(
                    "setting does not hold", extra={"key": key, "value": value, "detail": str(error)}
                )
        if not settings:
            await self._adopt({}, in_thread)
        for order in asked_settings(told):
            try:
                asked = with_order(settings, order)
                await self._adopt(asked, in_thread)
            except (ValueError, StartupError) as error:
                self._refuse(order, error)
                continue
            settings = asked
            self._answer(order, f"from version {self._state.version + 1} on")
        if settings:
            logger.warning("settings of an operator hold", extra={"values": settings})

    async def _adopt(self, settings: Mapping[str, Any], in_thread: InThread) -> None:
        """Take other settings. Raises ValueError, StartupError: they cannot be; nothing has changed."""
        config = with_settings(self._config, settings)
        await in_thread(lambda: self._state.adopt(config))

    def _refuse(self, order: Order | RollbackOrder, why: Exception) -> None:
        order_id = order.order if isinstance(order, RollbackOrder) else order.order_id
        logger.error("order refused", extra={"order": str(order), "detail": str(why)})
        self._drain.answer(OrderAnswer(order_id, _one_line(why), is_refused=True))

    def _answer(self, order: Order, answer: str) -> None:
        self._drain.answer(OrderAnswer(order.order_id, answer))

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
            self._refuse(order, gone)
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
        made = f"version {self._state.version} has the weights of version {order.version}"
        self._drain.answer(OrderAnswer(order.order, made))
        line = self._state.progress.step
        assert line is not None
        await self._disk_wait.until_written(
            f"the line of version {self._state.version}",
            lambda: in_thread(lambda: self._step_log.append(line)),
            stopping=stopping,
        )


def _one_line(error: Exception) -> str:
    """Return an error's text; of a value that breaks rules, the rules alone."""
    if isinstance(error, ValidationError):
        return "; ".join(details["msg"] for details in error.errors(include_url=False))
    return " ".join(str(error).split())
