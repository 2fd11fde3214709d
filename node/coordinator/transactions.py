"""One transaction after another: decide, write to the ledger, apply to the accounts, answer.

    decide --transaction--> ledger thread (fsync) --> accounts --> answer

A transaction that was begun is always finished, even if its caller has gone: memory and disk never tell
different stories.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final

from node.clock import Clock
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.accounts import Accounts, StoredGroup, Transaction
from node.coordinator.work.decisions import NOTHING, Answer, Decision
from node.coordinator.work.evaluation.evaluations import EvaluationChange
from node.coordinator.work.slots import Slot, SlotState
from node.errors import Reason, RefusedError

logger = logging.getLogger(__name__)

WAITING_TRANSACTIONS: Final = 4096
"""Callers that may wait for the ledger; more are told to come back. A second of a slow disk's work."""


class Transactions:
    """Owns the ledger, its thread and the accounts; used on the event loop's thread."""

    def __init__(
        self, ledger: Ledger, accounts: Accounts, *, metrics: CoordinatorMetrics, clock: Clock
    ) -> None:
        self.accounts = accounts
        """What the ledger adds up to; others only read it."""
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._turn = asyncio.Lock()
        self._begun: set[asyncio.Task[Any]] = set()

    async def settle(self, decide: Callable[[float], Decision[Answer]]) -> Answer:
        """Return the answer of a decision, once its transaction is on disk and applied.

        Raises:
            RefusedError: BUSY, where too many wait; DISK; what ``decide`` raises. Nothing was changed.
        """
        if len(self._begun) >= WAITING_TRANSACTIONS:
            raise RefusedError(
                Reason.BUSY, f"{WAITING_TRANSACTIONS} requests wait for the ledger", fix="try again later"
            )
        task = asyncio.create_task(self._settle(decide))
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return await asyncio.shield(task)

    async def read(self, slot: Slot) -> StoredGroup | None:
        """Return a slot's group; None where it has gone meanwhile, or is damaged and sampled again."""
        loop = asyncio.get_running_loop()
        try:
            stored = await loop.run_in_executor(self._thread, self._ledger.group, slot.number)
            return stored if stored is not None and stored.attempt == slot.winner else None
        except RefusedError as refused:
            logger.error("group damaged in the spool", extra={"slot": slot.number, "detail": str(refused)})
        self._metrics.damaged_groups.inc()

        def give_up(_: float) -> Decision[None]:
            again = self.accounts.slots.refused(slot.number, slot.winner)
            return Decision(None, Transaction(slots=() if again is None else (again,)))

        await self.settle(give_up)
        return None

    async def close(self) -> None:
        """Finish what was begun and close the ledger."""
        if self._begun:
            await asyncio.wait(self._begun)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.close)
        self._thread.shutdown()

    async def _settle(self, decide: Callable[[float], Decision[Answer]]) -> Answer:
        async with self._turn:
            now = self._clock.now()
            decision = decide(now)
            if decision.transaction != NOTHING:
                started_s = self._clock.monotonic()
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._ledger.record, decision.transaction)
                self._metrics.transaction.observe(self._clock.monotonic() - started_s)
                self.accounts.apply(decision.transaction, now=now)
                self._note_abandoned(decision.transaction)
                if decision.transaction.evaluation is not None:
                    self._note_evaluation(decision.transaction.evaluation)
            return decision.answer

    def _note_abandoned(self, transaction: Transaction) -> None:
        bad = {entry.slot: entry for entry in transaction.bad_prompts}
        for slot in transaction.slots:
            if slot.state is not SlotState.ABANDONED or (reason := slot.last_failure) is None:
                continue
            self._metrics.abandoned_prompts.labels(reason).inc()
            entry = bad.get(slot.number)
            logger.warning(
                "prompt abandoned",
                extra={
                    "prompt_index": slot.prompt_index,
                    "slot": slot.number,
                    "attempts": slot.granted,
                    "reason": reason,
                    "detail": "" if entry is None else entry.detail,
                    "times": 0 if entry is None else entry.times,
                    "retry_in_s": 0.0 if entry is None else entry.retry_at_s - entry.at_s,
                },
            )

    def _note_evaluation(self, change: EvaluationChange) -> None:
        evaluation = change.evaluation
        for record in change.recomputed:
            logger.warning(
                "evaluation worked out again without revoked samplers",
                extra={"version": record.version, "reward_mean": record.reward_mean},
            )
        if evaluation is None:
            return
        for slot in change.slots:
            if slot.state is SlotState.ABANDONED:
                logger.warning(
                    "held-out prompt not answered",
                    extra={
                        "prompt_index": slot.prompt_index,
                        "version": evaluation.version,
                        "attempts": slot.granted,
                        "reason": slot.last_failure,
                    },
                )
        if evaluation.finished_at_s:
            self._metrics.evaluation_dropped_prompts.inc(evaluation.dropped_prompts)
            logger.info("version evaluated", extra=asdict(evaluation))
            for sampler in change.odd_samplers:
                self._metrics.evaluation_odd_samplers.inc()
                logger.warning(
                    "answers left out: they differ from the other samplers' one way",
                    extra={"sampler": sampler, "version": evaluation.version},
                )
            if evaluation.disputed_by:
                self._metrics.evaluation_disputes.inc()
                logger.warning(
                    "samplers disagree on a version, and no third can say which is right",
                    extra={"samplers": evaluation.disputed_by, "version": evaluation.version},
                )
        elif not evaluation.answers and all(not slot.granted for slot in change.slots):
            logger.info(
                "evaluation begun", extra={"version": evaluation.version, "prompts": evaluation.prompts}
            )
