"""Carries out operators' orders, `set` and `rollback`, between two steps.

    rollback   masters of the earlier version --> a checkpoint of the next one --> record, line, publication
    setting    configuration with other values --> the following steps, whose entries in the journal have them

A rollback needs no entry in the journal: its checkpoint is there whole or not at all, and the journal goes on
behind it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from learner.metrics import LearnerMetrics
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
from learner.training.work_thread import WorkThread
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.errors import StartupError
from node.values.operator_order import Order, OrderAnswer

logger = logging.getLogger(__name__)


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
        state: TrainingState,
        drain: RolloutDrain,
        step_log: StepLog,
        thread: WorkThread,
        checkpoints: CheckpointWriter,
        metrics: LearnerMetrics,
    ) -> None:
        """Heed the orders that come with ``drain``.

        Args:
            state: with the learner's own settings.
            thread: that of ``state``.
        """
        self._earlier = earlier
        self._config = state.config
        self._state = state
        self._drain = drain
        self._step_log = step_log
        self._thread = thread
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._heeded: tuple[Order, ...] = ()
        """As they were told last."""

    async def obey(self) -> None:
        """Do what operators have ordered since the last call: take the settings that hold now, roll back.

        Raises:
            OSError, ValueError: as ``_roll_back``.
        """
        if (told := self._drain.orders) is self._heeded:
            return
        self._heeded = told
        await self._take_settings(told)
        order = asked_rollback(told)
        if order is None:
            return
        done = self._state.progress.rollback
        if done is not None and done.order == order.order_id:
            self._answer(order, f"version {done.version} has the weights of version {done.restored_version}")
            return
        try:
            rollback = rollback_of(order, self._state.progress)
        except ValueError as why:
            self._refuse(order, why)
            return
        await self._checkpoints.end()
        await self._roll_back(rollback)

    async def _take_settings(self, told: tuple[Order, ...]) -> None:
        """Take the settings that held before, then those that are asked for, one by one."""
        settings: dict[str, Any] = {}
        for key, value in known_settings(told).items():
            try:
                await self._adopt(settings | {key: value})
                settings[key] = value
            except (ValueError, StartupError) as error:  # the configuration has changed since
                logger.error(
                    "setting does not hold", extra={"key": key, "value": value, "detail": str(error)}
                )
        if not settings:
            await self._adopt({})
        for order in asked_settings(told):
            try:
                asked = with_order(settings, order)
                await self._adopt(asked)
            except (ValueError, StartupError) as error:
                self._refuse(order, error)
                continue
            settings = asked
            self._answer(order, f"from version {self._state.version + 1} on")
        if settings:
            logger.warning("settings of an operator hold", extra={"values": settings})

    async def _adopt(self, settings: Mapping[str, Any]) -> None:
        """Take other settings. Raises ValueError, StartupError: they cannot be; nothing has changed."""
        config = with_settings(self._config, settings)
        await self._thread.do(lambda: self._state.adopt(config))

    def _refuse(self, order: Order | RollbackOrder, why: Exception) -> None:
        order_id = order.order if isinstance(order, RollbackOrder) else order.order_id
        logger.error("order refused", extra={"order": str(order), "detail": str(why)})
        self._drain.answer(OrderAnswer(order_id, _one_line(why), is_refused=True))

    def _answer(self, order: Order, answer: str) -> None:
        self._drain.answer(OrderAnswer(order.order_id, answer))

    async def _roll_back(self, order: RollbackOrder) -> None:
        """Make the next version of an earlier one's weights; nobody hears of it before it is durable.

        Raises:
            OSError, ValueError: what was staged cannot be read back. The next start is at the version before.
        """
        try:
            masters = await self._thread.do(lambda: self._earlier.stage(order.version))
        except VersionGoneError as gone:
            self._refuse(order, gone)
            return
        unacknowledged = self._drain.unacknowledged
        copied = await self._thread.do(
            lambda: self._state.roll_back(order, masters, unacknowledged=unacknowledged)
        )
        await self._thread.do(self._earlier.clear)
        self._checkpoints.begin(copied)
        if not await self._checkpoints.end():
            return  # stopped while the disk was full: the order stands at the next start
        self._drain.record(await self._thread.do(lambda: self._state.rolled_back(copied)))
        self._state.master_access.hold(self._state.version)
        fields = {"restored_version": order.version, "because": order.because}
        logger.warning("rolled back", extra={"version": self._state.version, **fields})
        self._metrics.version.set(self._state.version)
        self._metrics.rollbacks.inc()
        made = f"version {self._state.version} has the weights of version {order.version}"
        self._drain.answer(OrderAnswer(order.order, made))
        line = self._state.progress.step
        assert line is not None
        await self._thread.until_written(
            f"the line of version {self._state.version}", lambda: self._step_log.append(line)
        )


def _one_line(error: Exception) -> str:
    """Return an error's text; of a value that breaks rules, the rules alone."""
    if isinstance(error, ValidationError):
        return "; ".join(details["msg"] for details in error.errors(include_url=False))
    return " ".join(str(error).split())
