"""One transaction after another: decide, write to the ledger, apply to the accounts, answer.

    waiting --its caller's turn--> decide --transaction--> ledger thread (fsync) --> accounts --> answer
       '-- the caller has gone, has waited too long, or the process stops: dropped, nothing was decided

A transaction that was begun is always finished, even if its caller has gone: memory and disk never tell
different stories.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final, Generic, TypeVar

from node.clock import Clock
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.accounts import Accounts, StoredGroup, Transaction
from node.coordinator.work.decisions import NOTHING, Answer, Decision
from node.coordinator.work.evaluation.evaluations import EvaluationChange
from node.coordinator.work.slots import Slot, SlotState
from node.errors import Reason, RefusedError
from node.process.abandoned_threads import abandon

logger = logging.getLogger(__name__)

Waiting = TypeVar("Waiting")

WAITING_REQUESTS: Final = 4096
"""Requests that may wait for the ledger; more are told to come back."""

WAITING_PER_CALLER: Final = 64
"""Limit for one sampler, which sends a few at a time: no sampler may fill the room of all."""

WAIT_S: Final = 5.0
"""Longest a sampler waits for its turn: a third of its deadline, so that it hears why it has no answer."""

FRESH_BYTES: Final = 32 << 20
"""Groups kept in memory after they were written: a learner that keeps up gets them without a read."""

CLOSE_S: Final = 5.0
"""Longest the last write and the closing of the ledger may take. A process that ends without them loses
nothing that was answered."""


class Turns(Generic[Waiting]):
    """The requests that wait, callers in turn and each one's in order; every step costs O(1).

        caller a   a1 a2 a3        taken: a1 b1 c1 a2 a3
        caller b   b1
        caller c   c1

    A caller that asks a thousand times at once waits for a thousand turns; the others wait for one of its.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Waiting, None]] = OrderedDict()
        self._requests = 0

    def __len__(self) -> int:
        return self._requests

    def of(self, caller: str) -> int:
        return len(self._waiting.get(caller, ()))

    def add(self, caller: str, request: Waiting) -> None:
        self._waiting.setdefault(caller, OrderedDict())[request] = None
        self._requests += 1

    def remove(self, caller: str, request: Waiting) -> bool:
        own = self._waiting.get(caller)
        if own is None or request not in own:
            return False
        del own[request]
        self._requests -= 1
        if not own:
            del self._waiting[caller]
        return True

    def take(self) -> Waiting:
        """Remove the request whose turn it is, and return it; there must be one."""
        caller, own = next(iter(self._waiting.items()))
        request, _ = own.popitem(last=False)
        self._requests -= 1
        if own:
            self._waiting.move_to_end(caller)
        else:
            del self._waiting[caller]
        return request


@dataclass(slots=True, eq=False)
class _Request:
    decide: Callable[[float], Decision[Any]]
    answer: "asyncio.Future[Any]"

    def refuse(self, refusal: RefusedError) -> None:
        if not self.answer.done():
            self.answer.set_exception(refusal)


class Transactions:
    """Owns the ledger, its thread and the accounts; used on the event loop's thread."""

    def __init__(
        self, ledger: Ledger, accounts: Accounts, *, metrics: CoordinatorMetrics, clock: Clock
    ) -> None:
        self.accounts = accounts
        """The accounts that the ledger adds up to; others only read them."""
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._urgent: Turns[_Request] = Turns()
        self._waiting: Turns[_Request] = Turns()
        self._fresh: OrderedDict[int, StoredGroup] = OrderedDict()
        """By slot, the oldest first."""
        self._fresh_bytes = 0
        self._worker: asyncio.Task[None] | None = None
        self._is_closing = False
        metrics.waiting_requests.set_function(lambda: len(self._urgent) + len(self._waiting))

    async def settle(
        self, decide: Callable[[float], Decision[Answer]], *, caller: str | None = None
    ) -> Answer:
        """Return the answer of a decision, once its transaction is on disk and applied.

        Args:
            caller: The sampler it is for. None: for the run's one learner or our own upkeep, which thousands
                of samplers must not hold up; it goes first and waits as long as it takes.
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
        request = _Request(decide, loop.create_future())
        turns.add(name, request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        limit = None if caller is None else loop.call_later(WAIT_S, self._give_up, caller, request)
        try:
            answer: Answer = await request.answer
            return answer
        except asyncio.CancelledError:
            if turns.remove(name, request):
                self._metrics.dropped_decisions.labels("gone").inc()
            raise
        finally:
            if limit is not None:
                limit.cancel()

    async def read(self, slot: Slot) -> StoredGroup | None:
        """Return a slot's group; None where it has gone meanwhile, or is damaged and sampled again."""
        fresh = self._drop_fresh(slot.number)
        if fresh is not None and fresh.attempt == slot.winner:
            return fresh
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
        """Refuse those that wait, finish what was begun and close the ledger, within CLOSE_S."""
        self._is_closing = True
        while turns := self._urgent or self._waiting:
            turns.take().refuse(self._dropped("draining"))
        is_closed = False
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._worker is not None:
                    await asyncio.wait({self._worker})
                await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.close)
                is_closed = True
        except TimeoutError:
            logger.error("ledger not closed in time", extra={"limit_s": CLOSE_S})
        finally:
            self._thread.shutdown(wait=False)
            if not is_closed:
                abandon("ledger")

    async def _work(self) -> None:
        while turns := self._urgent or self._waiting:
            request = turns.take()
            if request.answer.cancelled():  # its caller has not run since
                self._metrics.dropped_decisions.labels("gone").inc()
                continue
            try:
                answer = await self._settle(request.decide)
            except Exception as error:  # the caller's to handle, whatever it is
                if request.answer.done():
                    logger.error("decision failed after its caller had gone", exc_info=error)
                else:
                    request.answer.set_exception(error)
            else:
                if not request.answer.done():
                    request.answer.set_result(answer)
            await asyncio.sleep(0)  # heartbeats go between two decisions, also where none of them is written

    async def _settle(self, decide: Callable[[float], Decision[Answer]]) -> Answer:
        now = self._clock.now()
        decision = decide(now)
        if decision.transaction != NOTHING:
            started_s = self._clock.monotonic()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._ledger.record, decision.transaction)
            self._metrics.transaction.observe(self._clock.monotonic() - started_s)
            self.accounts.apply(decision.transaction, now=now)
            self._keep_fresh(decision.transaction)
            self._note_abandoned(decision.transaction)
            if decision.transaction.evaluation is not None:
                self._note_evaluation(decision.transaction.evaluation)
        return decision.answer

    def _keep_fresh(self, transaction: Transaction) -> None:
        for slot in transaction.slots:
            self._drop_fresh(slot.number)
        if (stored := transaction.stored) is not None:
            self._fresh[stored.slot] = stored
            self._fresh_bytes += stored.group.size_bytes
            while self._fresh_bytes > FRESH_BYTES:
                self._drop_fresh(next(iter(self._fresh)))

    def _drop_fresh(self, number: int) -> StoredGroup | None:
        stored = self._fresh.pop(number, None)
        self._fresh_bytes -= 0 if stored is None else stored.group.size_bytes
        return stored

    def _give_up(self, caller: str, request: _Request) -> None:
        if self._waiting.remove(caller, request):
            request.refuse(self._dropped("late"))

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
        bad = {entry.slot: entry for entry in transaction.prompts.bad}
        for slot in transaction.slots:
            if slot.state is SlotState.ABANDONED and (reason := slot.last_failure) is not None:
                self._metrics.abandoned_prompts.labels(reason).inc()
                about = asdict(bad[slot.number]) if slot.number in bad else {}
                logger.warning(
                    "prompt abandoned",
                    extra={"prompt_index": slot.prompt_index, "slot": slot.number, "reason": reason, **about},
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
        version = {"version": evaluation.version}
        for slot in change.slots:
            if slot.state is SlotState.ABANDONED:
                about = {"prompt_index": slot.prompt_index, "reason": slot.last_failure, **version}
                logger.warning("held-out prompt not answered", extra=about)
        if evaluation.finished_at_s:
            is_odd = evaluation.left_out or evaluation.disputed_by
            level = logging.WARNING if is_odd else logging.INFO
            logger.log(level, "version evaluated", extra=asdict(evaluation))
            self._metrics.evaluation_odd_samplers.inc(len(change.odd_samplers))
            self._metrics.evaluation_disputes.inc(bool(evaluation.disputed_by))
