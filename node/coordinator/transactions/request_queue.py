"""Requests that wait for the ledger: the run's own first, then samplers in turn; within bounds."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.work.decisions.decision import Decide
from node.errors import Reason, RefusedError

logger = logging.getLogger(__name__)

WAITING_REQUESTS: Final = 4096
"""Requests that may wait for the ledger; more are told to come back."""

WAITING_PER_CALLER: Final = 128
"""Limit for one sampler, which submits at most 64 groups at once on each of two streams: no sampler may fill
the room of all."""

WAIT_S: Final = 5.0
"""Longest a sampler waits for its turn: a third of its deadline, so that it hears why it has no answer."""

Waiting = TypeVar("Waiting")


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
class WaitingRequest:
    """A decision to be taken, and who waits for its answer."""

    decide: Decide[Any]
    answer: "asyncio.Future[Any]"
    caller: str | None
    """The sampler; None: the run's learner, or our own upkeep."""
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


class RequestQueue:
    """Used on the event loop's thread.

    What the run's one learner and our own upkeep ask goes first, and waits as long as it takes: thousands of
    samplers must not hold it up.
    """

    def __init__(self, metrics: CoordinatorMetrics) -> None:
        self._urgent: Turns[WaitingRequest] = Turns()
        self._waiting: Turns[WaitingRequest] = Turns()
        self._metrics = metrics
        metrics.waiting_requests.set_function(lambda: len(self))

    def __len__(self) -> int:
        return len(self._urgent) + len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether another request that nobody waits for may be put in."""
        return len(self._urgent) < WAITING_REQUESTS

    def put(self, decide: Decide[Any], caller: str | None) -> WaitingRequest:
        """Put a request in its place, for WAIT_S at most if a sampler's.

        Raises RefusedError: BUSY; too many wait.
        """
        turns = self._turns_of(caller)
        if len(turns) >= WAITING_REQUESTS or (caller and turns.of(caller) >= WAITING_PER_CALLER):
            raise self.dropped("full")
        loop = asyncio.get_running_loop()
        request = WaitingRequest(decide, loop.create_future(), caller)
        turns.add(caller or "", request)
        if caller is not None:
            limit = loop.call_later(WAIT_S, self._give_up, request)
            request.answer.add_done_callback(lambda _: limit.cancel())
        return request

    def take(self) -> WaitingRequest | None:
        """Remove the request whose turn it is, and return it; None: none waits whose caller is there."""
        while turns := self._urgent or self._waiting:
            request = turns.take()
            if not request.answer.cancelled():
                return request
            self._metrics.dropped_decisions.labels("gone").inc()  # its caller has not run since
        return None

    def withdraw(self, request: WaitingRequest) -> bool:
        """Remove a request whose caller has gone; return whether it still waited."""
        has_waited = self._turns_of(request.caller).remove(request.caller or "", request)
        if has_waited:
            self._metrics.dropped_decisions.labels("gone").inc()
        return has_waited

    def _give_up(self, request: WaitingRequest) -> None:
        """Refuse a request that has waited too long, if it still waits."""
        if self._turns_of(request.caller).remove(request.caller or "", request):
            request.give(self.dropped("late"))

    def refuse_all(self) -> None:
        """Refuse all that wait: the coordinator stops."""
        while turns := self._urgent or self._waiting:
            turns.take().give(self.dropped("draining"))

    def dropped(self, cause: str) -> RefusedError:
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

    def _turns_of(self, caller: str | None) -> Turns[WaitingRequest]:
        return self._urgent if caller is None else self._waiting
