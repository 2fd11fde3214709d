"""Steps an engine for as long as it has something to draw; requests come and go between two steps.

    changes --add, cancel--> step --results--> changes ...     until there are no more changes to wait for

One loop for an engine inside the sampler and for one in a process of its own. The other end of the exchange
is told of results and not waited for, so a step begins as soon as the one before has ended. The loop ends
only for a change of the live words, or when nothing is left to draw.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from node.errors import RefusedError
from sampler.engines.engine import Engine, GenerationRequest
from sampler.engines.restartable_engine import EngineEndedError

TELL_S: Final = 0.005
"""Results are told after a step in which a request ended, or else after this time: about a decode step on a
GPU. With them an engine in a process of its own gets new requests; and that none come shows a hang."""

RequestChange = GenerationRequest | str
"""A request to add, or the id of one to cancel."""


@dataclass(frozen=True, slots=True)
class StepResults:
    """The end of requests, and the number of steps, since the last results."""

    finished: Sequence[GenerationRequest] = ()
    refused: Sequence[tuple[str, RefusedError]] = ()
    """The ids of requests that the engine does not take."""
    steps: int = 0


class StepExchange(Protocol):
    """The other end of ``step_on``; called in the thread that drives the engine."""

    def changes(self, *, running: int) -> Sequence[RequestChange] | None:
        """Return what to change before the next step, in order; None: return, without another step.

        With no request ``running`` there is no step: wait for requests here, or return None.
        """

    def tell(self, results: StepResults) -> None:
        """Take results; every request that ends is among them."""


@runtime_checkable
class SteppingEngine(Protocol):
    """An engine that steps on in a way of its own: in another process, or with the next step under way."""

    def step_on(self, exchange: StepExchange) -> None: ...


def step_on(engine: Engine, exchange: StepExchange) -> None:
    """Step until ``exchange`` has no more changes; errors are those of the engine."""
    if isinstance(engine, SteppingEngine):
        engine.step_on(exchange)
    else:
        keep_stepping(engine, exchange, step=engine.step)


def keep_stepping(
    engine: Engine,
    exchange: StepExchange,
    *,
    step: Callable[[], list[GenerationRequest]],
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Do what ``step_on`` does, by calls of ``step``."""
    steps, told_s = 0, monotonic()
    while (changes := exchange.changes(running=engine.running)) is not None:
        refused = _change(engine, changes)
        finished = []
        if engine.running:
            finished = step()
            steps += 1
        if finished or refused or not engine.running or monotonic() - told_s >= TELL_S:
            exchange.tell(StepResults(finished, refused, steps))
            steps, told_s = 0, monotonic()
    if steps:
        exchange.tell(StepResults(steps=steps))


def _change(engine: Engine, changes: Iterable[RequestChange]) -> list[tuple[str, RefusedError]]:
    """Add and cancel requests; return those that the engine refuses."""
    refused = []
    for change in changes:
        if isinstance(change, str):
            engine.cancel([change])
            continue
        try:
            engine.add(change)
        except EngineEndedError:
            raise
        except RefusedError as error:
            refused.append((change.request_id, error))
    return refused
