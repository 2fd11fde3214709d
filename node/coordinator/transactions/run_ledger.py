"""The run's ledger: requests are decided in batches, made durable, and only then answered.

    waiting --its caller's turn--> decided, after all before it --> ledger thread: one commit for the batch
       |                                                              |--on disk--> told, answered, in order
       |                                                              '--failed---> refused; accounts go back
       '-- the caller has gone, has waited too long, or the process stops: dropped, nothing was decided

Requests that wait while one batch is written are decided in the next, so that a slow disk costs each its
commit and not those of all before it. Nobody is told of anything that is not on disk: answers that only
repeat what an earlier decision of the batch made so wait for it as well. After a failed commit the accounts
are what the ledger holds, as after a restart, and for a while each transaction has a commit of its own,
applied after it.

A transaction that was begun is always finished, even if its caller has gone: memory and disk never tell
different stories, and what follows from an answer follows without its caller (``when``). What would be wrong
to keep for a caller that was never told of it, a lease, is undone by a decision of its own, in the next
batch.
"""

import asyncio
import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.transactions.fresh_groups import FreshGroups, is_winner
from node.coordinator.transactions.request_queue import RequestQueue, WaitingRequest
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.decision import Answer, Batch, Decide, Decision
from node.coordinator.work.slots.slot import Slot
from node.errors import Reason, RefusedError
from node.process.abandoned_threads import abandon
from node.system.clock import Clock
from node.telemetry.own_faults import OwnFaults
from node.values.groups.rollout import EncodedGroup

logger = logging.getLogger(__name__)

BATCH_REQUESTS: Final = 128
"""Decisions that share a commit. All wait for the last of them, some 10 ms of deciding."""

BATCH_BYTES: Final = 16 << 20
"""Groups that share a commit: about as long to write as a sync takes twice."""

CAREFUL_S: Final = 10.0
"""Time after a failed commit in which each transaction has its own: while a disk is full, small ones fit and
large ones do not, and only those are to fail."""

CLOSE_S: Final = 5.0
"""Longest the last write and the closing of the ledger may take. A process that ends without them loses
nothing that was answered."""

_LEDGER: Final = "ledger"
"""Part of this process, for its faults."""

_Work = TypeVar("_Work")


class RunLedger:
    """Owns the ledger's file or database, its thread and the accounts; used on the event loop's thread."""

    def __init__(
        self,
        engine: LedgerEngine,
        accounts: Accounts,
        *,
        metrics: CoordinatorMetrics,
        faults: OwnFaults,
        clock: Clock,
    ) -> None:
        self.accounts = accounts
        """The accounts that the ledger adds up to; others only read them."""
        self._engine = engine
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._queue = RequestQueue(metrics)
        self._fresh = FreshGroups()
        self._followers: defaultdict[type, list[Callable[[Any], None]]] = defaultdict(list)
        """Kind of answer, or ``Transaction`` -> what follows once it is on disk."""
        self._worker: asyncio.Task[None] | None = None
        self._batch: asyncio.Future[None] | None = None
        """Done when the batch under way has ended."""
        self._is_ahead = False
        """Whether the accounts hold what the disk refused."""
        self._careful_until_s = -math.inf
        self._is_closing = False
        self.went_back: Callable[[], None] = lambda: None
        """Called when the accounts have gone back to what the ledger holds."""

    def when(self, kind: type[Answer], then: Callable[[Answer], None]) -> None:
        """Call ``then`` with each answer of a kind once it is on disk, before its caller has it; or with each
        ``Transaction``."""
        self._followers[kind].append(then)

    async def decide(
        self,
        decide: Decide[Answer],
        *,
        caller: str | None = None,
        undo: Callable[[Answer], Decide[Any] | None] = lambda _: None,
    ) -> Answer:
        """Return the answer of a decision, once its transaction is on disk and applied.

        Args:
            caller: The sampler it is for. None: for the run's one learner or our own upkeep.
            undo: Returns the decision that undoes this one, if there is anything to undo. It is taken where
                the caller goes before it is told.
        Raises:
            RefusedError: BUSY, where too many wait or this one has waited for too long; DRAINING; DISK; what
                ``decide`` raises. Nothing was changed.
        """
        request = self._put(decide, caller)
        try:
            answer: Answer = await request.answer
            return answer
        except asyncio.CancelledError:
            if not self._queue.withdraw(request):
                request.when_decided(lambda answer: self.decide_unheard(undo(answer)))
            raise

    def promise(self, decide: Decide[Answer], *, caller: str) -> "asyncio.Future[Answer]":
        """Return a future of what ``decide`` of this class returns or raises, which takes no task to wait.

        Cancelling it withdraws the decision, unless it is taken already: nothing undoes it.

        Raises RefusedError: BUSY, where too many wait; DRAINING.
        """
        request = self._put(decide, caller)
        request.answer.add_done_callback(
            lambda answer: self._queue.withdraw(request) if answer.cancelled() else None
        )
        return request.answer

    def decide_unheard(self, decide: Decide[Any] | None) -> None:
        """Take a decision whose answer nobody waits for; none where too many wait, or when closing."""
        if decide is not None and not self._is_closing and self._queue.has_room:
            self._put(decide, None).answer.add_done_callback(_log_failure)

    async def group(self, slot: Slot) -> EncodedGroup | None:
        """Return a slot's group; None where it has gone meanwhile, or is damaged and sampled again.

        Raises:
            RefusedError: This coordinator leads no longer.
        """
        if (fresh := self._fresh.take(slot)) is not None:
            return fresh
        if self._batch is not None:  # which may have decided on the group, and not have it on disk yet
            await asyncio.wait({self._batch})
            if (fresh := self._fresh.take(slot)) is not None:
                return fresh
        try:
            stored = await self._in_thread(lambda: self._engine.group(slot.number))
            return stored if stored is not None and is_winner(stored, slot) else None
        except RefusedError as refused:
            if refused.reason is not Reason.DAMAGED:
                raise
            logger.error("group damaged in the spool", extra={"slot": slot.number, "detail": str(refused)})
        self._metrics.damaged_groups.inc()

        def give_up(accounts: Accounts, /, *, now: float) -> Decision[None]:
            again = accounts.slots.refused(slot.number, slot.winner)
            return Decision(None, Transaction(slots=() if again is None else (again,)))

        await self.decide(give_up)
        return None

    async def kept_group(self, slot: int, name: str) -> EncodedGroup | None:
        """Return a group that was trained on and is kept to be checked; None where it has gone or is damaged.

        Raises:
            RefusedError: This coordinator leads no longer.
        """
        try:
            stored = await self._in_thread(lambda: self._engine.group(slot))
        except RefusedError as refused:
            if refused.reason is not Reason.DAMAGED:
                raise
            logger.error("group damaged in the spool", extra={"slot": slot, "detail": str(refused)})
            self._metrics.damaged_groups.inc()
            return None
        return stored if stored is not None and stored.group_id == name else None

    async def close(self) -> None:
        """Refuse those that wait, finish what was begun and close the ledger, within CLOSE_S."""
        self._is_closing = True
        self._queue.refuse_all()
        is_closed = False
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._worker is not None:
                    await asyncio.wait({self._worker})
                await self._in_thread(self._engine.close)
                is_closed = True
        except TimeoutError:
            logger.error("ledger not closed in time", extra={"limit_s": CLOSE_S})
        finally:
            self._thread.shutdown(wait=False)
            if not is_closed:
                abandon("ledger")

    def _put(self, decide: Decide[Any], caller: str | None) -> WaitingRequest:
        if self._is_closing:
            raise self._queue.dropped("draining")
        request = self._queue.put(decide, caller)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return request

    async def _work(self) -> None:
        while len(self._queue):
            self._batch = asyncio.get_running_loop().create_future()
            try:
                await self._decide_batch()
            finally:
                self._batch.set_result(None)
                self._batch = None

    async def _decide_batch(self) -> None:
        batch = Batch(self.accounts)
        outcomes: list[tuple[WaitingRequest, object]] = []
        is_careful = self._clock.monotonic() < self._careful_until_s
        most = 1 if is_careful or self._is_ahead else BATCH_REQUESTS
        while len(outcomes) < most and (request := self._queue.take()) is not None:
            outcome = await self._outcome(batch, request)
            is_last = isinstance(outcome, Decision) and outcome.is_last
            outcomes.append((request, outcome.answer if isinstance(outcome, Decision) else outcome))
            if is_last or batch.size_bytes >= BATCH_BYTES:
                break
            await asyncio.sleep(0)  # heartbeats go between two decisions, also where none of them is written
        failure = await self._commit(batch)
        for request, answer in outcomes:
            if failure is None:
                self._follow(answer)
            request.give(failure or answer)
        await asyncio.sleep(0)  # the callers go on before the next decision

    async def _outcome(self, batch: Batch, request: WaitingRequest) -> Decision[Any] | Exception:
        try:
            await self._go_back()
            return batch.decide(request.decide, now=self._clock.now())
        except Exception as error:  # the caller's to handle, whatever it is
            return error

    def _follow(self, answer: object) -> None:
        """Do what follows from an answer, or a transaction, that is on disk."""
        for then in self._followers.get(type(answer), ()):
            try:
                then(answer)
            except Exception:
                logger.exception("what follows from a decision failed", extra={"kind": type(answer).__name__})

    async def _commit(self, batch: Batch) -> Exception | None:
        """Write a batch and apply it; return why it failed."""
        if not (transactions := batch.transactions):
            return None
        started_s = self._clock.monotonic()
        try:
            await self._in_thread(lambda: self._engine.record(*transactions))
        except Exception as error:
            self._careful_until_s = self._clock.monotonic() + CAREFUL_S
            self._is_ahead = batch.is_applied_in_part
            if isinstance(error, RefusedError) and error.reason is Reason.DISK:
                fix = error.fix.partition(";")[0]
                self._faults.failed(_LEDGER, error.what, fix=f"{fix[:1].upper()}{fix[1:]}. Nothing is lost.")
            with contextlib.suppress(RefusedError):  # tried again, and told to a caller, at the next decision
                await self._go_back()
            if isinstance(error, RefusedError) or len(transactions) == 1:
                return error
            logger.error("one of several transactions failed", exc_info=error)
            return RefusedError(
                Reason.BUSY, "it was to be written together with another that failed", fix="send it again"
            )
        self._faults.works(_LEDGER)
        self._metrics.transaction.observe(self._clock.monotonic() - started_s)
        self._metrics.transactions.inc(len(transactions))
        batch.apply()
        for transaction in transactions:
            self._fresh.note(transaction)
            self._follow(transaction)
        return None

    async def _go_back(self) -> None:
        """Make the accounts what the ledger holds, where they are ahead of it.

        Raises:
            RefusedError: The ledger cannot be read either.
        """
        if not self._is_ahead:
            return
        balance = await self._in_thread(self._engine.balance)
        self.accounts.go_back(balance, now=self._clock.now())
        self._fresh.clear()
        self._is_ahead = False
        self._metrics.undone_batches.inc()
        logger.error("a commit of several transactions failed; went back to what the ledger holds")
        self.went_back()

    async def _in_thread(self, work: Callable[[], _Work]) -> _Work:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _log_failure(unheard: "asyncio.Future[Any]") -> None:
    if (error := unheard.exception()) is not None:
        level = logging.WARNING if isinstance(error, RefusedError) else logging.ERROR
        logger.log(level, "decision failed that nobody waits for", exc_info=error)
