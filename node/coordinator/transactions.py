"""Transactions in batches: decide, write to the ledger, apply to the accounts, answer.

    waiting --its caller's turn--> decided, after all before it --> ledger thread: one commit for the batch
       |                                                              |--on disk--> answered, in order
       |                                                              '--failed---> refused; accounts go back
       '-- the caller has gone, has waited too long, or the process stops: dropped, nothing was decided

Whoever waits while one batch is written is decided in the next, so that a slow disk costs each its commit and
not those of all before it. Nobody is told of anything that is not on disk: answers that only repeat what an
earlier decision of the batch made so wait for it as well. After a failed commit the accounts are what the
ledger holds, as after a restart, and for a while each transaction has a commit of its own, applied after it.

A transaction that was begun is always finished, even if its caller has gone: memory and disk never tell
different stories. What would be wrong to keep for a caller that was never told of it, a lease, is undone by a
decision of its own, in the next batch.
"""

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from node.clock import Clock
from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.batch import Batch
from node.coordinator.work.decisions import Answer, Decision
from node.coordinator.work.slots import Slot, SlotKind, SlotState, group_id, slot_and_attempt
from node.coordinator.work.turns import Turns
from node.errors import Reason, RefusedError
from node.evaluation import Evaluation
from node.failure import BadPrompt
from node.process.abandoned_threads import abandon
from node.rollout import EncodedGroup
from node.telemetry.own_faults import OwnFaults

logger = logging.getLogger(__name__)

Decide = Callable[[float], Decision[Any]]

WAITING_REQUESTS: Final = 4096
"""Requests that may wait for the ledger; more are told to come back."""

WAITING_PER_CALLER: Final = 64
"""Limit for one sampler, which sends a few at a time: no sampler may fill the room of all."""

WAIT_S: Final = 5.0
"""Longest a sampler waits for its turn: a third of its deadline, so that it hears why it has no answer."""

BATCH_REQUESTS: Final = 128
"""Decisions that share a commit. All wait for the last of them, some 10 ms of deciding."""

BATCH_BYTES: Final = 16 << 20
"""Groups that share a commit: about as long to write as a sync takes twice."""

CAREFUL_S: Final = 10.0
"""Time after a failed commit in which each transaction has its own: while a disk is full, small ones fit and
large ones do not, and only those are to fail."""

FRESH_BYTES: Final = 32 << 20
"""Groups kept in memory after they were written: a learner that keeps up gets them without a read."""

CLOSE_S: Final = 5.0
"""Longest the last write and the closing of the ledger may take. A process that ends without them loses
nothing that was answered."""


_LEDGER: Final = "ledger"
"""Part of this process, for its faults."""


@dataclass(slots=True, eq=False)
class _Request:
    decide: Decide
    answer: "asyncio.Future[Any]"
    is_last: bool = False
    """Whether its caller has its answer before the next decision is taken."""
    _then: Callable[[Any], None] = lambda _: None

    def when_decided(self, then: Callable[[Any], None]) -> None:
        """Call ``then`` with the answer, which the caller has gone without: now, or once it is on disk."""
        if self.answer.cancelled():
            self._then = then
        elif self.answer.exception() is None:
            then(self.answer.result())

    def give(self, outcome: object) -> None:
        """Answer the caller, or raise an exception there; where it has gone, do what was to follow."""
        if self.answer.done():
            if isinstance(outcome, Exception):
                logger.error("decision failed after its caller had gone", exc_info=outcome)
            else:
                self._then(outcome)
        elif isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class Transactions:
    """Owns the ledger, its thread and the accounts; used on the event loop's thread."""

    def __init__(
        self,
        ledger: LedgerEngine,
        accounts: Accounts,
        *,
        metrics: CoordinatorMetrics,
        faults: OwnFaults,
        clock: Clock,
    ) -> None:
        self.accounts = accounts
        """The accounts that the ledger adds up to; others only read them."""
        self._ledger = ledger
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._urgent: Turns[_Request] = Turns()
        self._waiting: Turns[_Request] = Turns()
        self._fresh: OrderedDict[int, EncodedGroup] = OrderedDict()
        """By slot, the oldest first."""
        self._fresh_bytes = 0
        self._worker: asyncio.Task[None] | None = None
        self._batch: asyncio.Future[None] | None = None
        """Done when the batch under way has ended."""
        self._is_ahead = False
        """Whether the accounts hold what the disk refused."""
        self._careful_until_s = -math.inf
        self._is_closing = False
        self.went_back: Callable[[], None] = lambda: None
        """Called when the accounts have gone back to what the ledger holds."""
        metrics.waiting_requests.set_function(lambda: len(self._urgent) + len(self._waiting))

    async def settle(
        self,
        decide: Callable[[float], Decision[Answer]],
        *,
        caller: str | None = None,
        is_last: bool = False,
        undo: Callable[[Answer], Decide | None] = lambda _: None,
    ) -> Answer:
        """Return the answer of a decision, once its transaction is on disk and applied.

        Args:
            caller: The sampler it is for. None: for the run's one learner or our own upkeep, which thousands
                of samplers must not hold up; it goes first and waits as long as it takes.
            is_last: Close the batch: what the caller does with the answer, until it waits for something,
                comes before the next decision.
            undo: Returns the decision that undoes this one, if there is anything to undo. It is taken where
                the caller goes before it is told.
        Raises:
            RefusedError: BUSY, where too many wait or this one has waited for too long; DRAINING; DISK; what
                ``decide`` raises. Nothing was changed.
        """
        if self._is_closing:
            raise self._dropped("draining")
        turns, name = (self._urgent, "") if caller is None else (self._waiting, caller)
        if len(turns) >= WAITING_REQUESTS or (name and turns.of(name) >= WAITING_PER_CALLER):
            raise self._dropped("full")
        loop = asyncio.get_running_loop()
        request = _Request(decide, loop.create_future(), is_last)
        self._enqueue(turns, name, request)
        limit = None if caller is None else loop.call_later(WAIT_S, self._give_up, caller, request)
        try:
            answer: Answer = await request.answer
            return answer
        except asyncio.CancelledError:
            if turns.remove(name, request):
                self._metrics.dropped_decisions.labels("gone").inc()
            else:
                request.when_decided(lambda answer: self.settle_unheard(undo(answer)))
            raise
        finally:
            if limit is not None:
                limit.cancel()

    def settle_unheard(self, decide: Decide | None) -> None:
        """Take a decision whose answer nobody waits for; none where too many wait, or when closing."""
        if decide is not None and not self._is_closing and len(self._urgent) < WAITING_REQUESTS:
            request = _Request(decide, asyncio.get_running_loop().create_future())
            request.answer.add_done_callback(_log_failure)
            self._enqueue(self._urgent, "", request)

    async def read(self, slot: Slot) -> EncodedGroup | None:
        """Return a slot's group; None where it has gone meanwhile, or is damaged and sampled again.

        Raises:
            RefusedError: This coordinator leads no longer.
        """
        if (fresh := self._take_fresh(slot)) is not None:
            return fresh
        if self._batch is not None:  # which may have decided on the group, and not have it on disk yet
            await asyncio.wait({self._batch})
            if (fresh := self._take_fresh(slot)) is not None:
                return fresh
        try:
            stored = await self._in_thread(lambda: self._ledger.group(slot.number))
            return stored if stored is not None and _is_winner(stored, slot) else None
        except RefusedError as refused:
            if refused.reason is not Reason.DAMAGED:
                raise
            logger.error("group damaged in the spool", extra={"slot": slot.number, "detail": str(refused)})
        self._metrics.damaged_groups.inc()

        def give_up(_: float) -> Decision[None]:
            again = self.accounts.slots.refused(slot.number, slot.winner)
            return Decision(None, Transaction(slots=() if again is None else (again,)))

        await self.settle(give_up)
        return None

    async def read_kept(self, slot: int, name: str) -> EncodedGroup | None:
        """Return a group that was trained on and is kept to be checked; None where it has gone or is damaged.

        Raises:
            RefusedError: This coordinator leads no longer.
        """
        try:
            stored = await self._in_thread(lambda: self._ledger.group(slot))
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
        while turns := self._urgent or self._waiting:
            turns.take().give(self._dropped("draining"))
        is_closed = False
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._worker is not None:
                    await asyncio.wait({self._worker})
                await self._in_thread(self._ledger.close)
                is_closed = True
        except TimeoutError:
            logger.error("ledger not closed in time", extra={"limit_s": CLOSE_S})
        finally:
            self._thread.shutdown(wait=False)
            if not is_closed:
                abandon("ledger")

    def _enqueue(self, turns: Turns[_Request], caller: str, request: _Request) -> None:
        turns.add(caller, request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._urgent or self._waiting:
            self._batch = asyncio.get_running_loop().create_future()
            try:
                await self._settle_batch()
            finally:
                self._batch.set_result(None)
                self._batch = None

    async def _settle_batch(self) -> None:
        batch = Batch(self.accounts)
        outcomes: list[tuple[_Request, object]] = []
        is_careful = self._clock.monotonic() < self._careful_until_s
        most = 1 if is_careful or self._is_ahead else BATCH_REQUESTS
        while (turns := self._urgent or self._waiting) and len(outcomes) < most:
            request = turns.take()
            if request.answer.cancelled():  # its caller has not run since
                self._metrics.dropped_decisions.labels("gone").inc()
                continue
            outcomes.append((request, await self._outcome(batch, request)))
            if request.is_last or batch.size_bytes >= BATCH_BYTES:
                break
            await asyncio.sleep(0)  # heartbeats go between two decisions, also where none of them is written
        failure = await self._commit(batch)
        for request, outcome in outcomes:
            request.give(failure or outcome)
        await asyncio.sleep(0)  # the callers go on before the next decision

    async def _outcome(self, batch: Batch, request: _Request) -> object:
        try:
            await self._go_back()
            return batch.decide(request.decide, now=self._clock.now())
        except Exception as error:  # the caller's to handle, whatever it is
            return error

    async def _commit(self, batch: Batch) -> Exception | None:
        """Write a batch and apply it; return why it failed."""
        if not (transactions := batch.transactions):
            return None
        started_s = self._clock.monotonic()
        try:
            await self._in_thread(lambda: self._ledger.record(*transactions))
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
            self._keep_fresh(transaction)
            self._note_abandoned(transaction)
            for evaluation in transaction.of(Evaluation):
                what = "version evaluated" if evaluation.finished_at_s else "evaluation begins"
                logger.info(what, extra=asdict(evaluation))
        return None

    async def _go_back(self) -> None:
        """Make the accounts what the ledger holds, where they are ahead of it.

        Raises:
            RefusedError: The ledger cannot be read either.
        """
        if not self._is_ahead:
            return
        balance = await self._in_thread(self._ledger.balance)
        self.accounts.go_back(balance, now=self._clock.now())
        self._fresh.clear()
        self._fresh_bytes = 0
        self._is_ahead = False
        self._metrics.undone_batches.inc()
        logger.error("a commit of several transactions failed; went back to what the ledger holds")
        self.went_back()

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _keep_fresh(self, transaction: Transaction) -> None:
        for slot in transaction.slots:
            self._drop_fresh(slot.number)
        if (stored := transaction.stored or transaction.graded) is not None:
            number, _ = slot_and_attempt(stored.group_id)
            self._fresh[number] = stored
            self._fresh_bytes += stored.size_bytes
            while self._fresh_bytes > FRESH_BYTES:
                self._drop_fresh(next(iter(self._fresh)))

    def _take_fresh(self, slot: Slot) -> EncodedGroup | None:
        fresh = self._drop_fresh(slot.number)
        return fresh if fresh is not None and _is_winner(fresh, slot) else None

    def _drop_fresh(self, number: int) -> EncodedGroup | None:
        stored = self._fresh.pop(number, None)
        self._fresh_bytes -= 0 if stored is None else stored.size_bytes
        return stored

    def _give_up(self, caller: str, request: _Request) -> None:
        if self._waiting.remove(caller, request):
            request.give(self._dropped("late"))

    def _dropped(self, cause: str) -> RefusedError:
        """Count a decision that was not taken; return what its caller is told."""
        self._metrics.dropped_decisions.labels(cause).inc()
        if cause == "draining":
            return RefusedError(Reason.DRAINING, "the coordinator is stopping", fix="connect again later")
        return RefusedError(
            Reason.BUSY,
            f"{len(self._waiting)} requests wait for the coordinator's ledger, this one for "
            f"{WAIT_S if cause == 'late' else 0:g} s",
            fix="ask again after a pause; if it lasts, its disk is too slow for so many samplers",
        )

    def _note_abandoned(self, transaction: Transaction) -> None:
        bad = {entry.slot: entry for entry in transaction.of(BadPrompt)}
        for slot in transaction.slots:
            if slot.state is not SlotState.ABANDONED or (reason := slot.last_failure) is None:
                continue
            if slot.kind is SlotKind.HELD_OUT:
                about = {"prompt_index": slot.prompt_index, "slot": slot.number, "reason": reason}
                logger.warning("held-out prompt not answered", extra=about)
            else:
                self._metrics.abandoned_prompts.labels(reason).inc()
                about = asdict(bad[slot.number]) if slot.number in bad else {}
                logger.warning(
                    "prompt abandoned",
                    extra={"prompt_index": slot.prompt_index, "slot": slot.number, "reason": reason, **about},
                )


def _log_failure(unheard: "asyncio.Future[Any]") -> None:
    if (error := unheard.exception()) is not None:
        level = logging.WARNING if isinstance(error, RefusedError) else logging.ERROR
        logger.log(level, "decision failed that nobody waits for", exc_info=error)


def _is_winner(group: EncodedGroup, slot: Slot) -> bool:
    return group.group_id == group_id(slot.number, slot.winner)
