"""Steps with a scripted engine: what changes between two of them, and what is told of each."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from node.errors import Reason, RefusedError
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine import Engine, GenerationRequest
from sampler.engines.restartable_engine import EngineEndedError
from sampler.engines.stepping import TELL_S, RequestChange, StepResults, keep_stepping, step_on
from support.step_exchanges import Scripted

SAMPLING = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=3)


def request(name: str, *, tokens: int = 1) -> GenerationRequest:
    return GenerationRequest(name, np.arange(tokens, dtype=np.int32), 1, SAMPLING)


class CountingEngine:
    """Finishes a request after as many steps as its prompt has tokens; refuses those without any."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.now_s = 0.0
        self.steps = 0

    @property
    def running(self) -> int:
        return len(self.left)

    def add(self, request: GenerationRequest) -> None:
        if not len(request.prompt_token_ids):
            raise RefusedError(Reason.MALFORMED, "no tokens")
        self.left[request.request_id] = len(request.prompt_token_ids)

    def cancel(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self.left.pop(name, None)

    def step(self) -> list[GenerationRequest]:
        self.steps += 1
        self.now_s += 0.3 * TELL_S
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = [name for name, left in self.left.items() if not left]
        self.cancel(ended)
        return [request(name) for name in ended]


def stepped(engine: CountingEngine, *changes: Sequence[RequestChange] | None) -> Scripted:
    exchange = Scripted(*changes)
    keep_stepping(cast(Engine, engine), exchange, step=engine.step, monotonic=lambda: engine.now_s)
    return exchange


def test_requests_join_and_leave_between_two_steps_in_their_order() -> None:
    engine = CountingEngine()
    told = stepped(
        engine,
        [request("a", tokens=4), request("b", tokens=9)],
        ["b", request("b", tokens=1)],
        [],
        [request("c", tokens=1), "c"],
    )
    assert told.finished == ["b", "a"]
    assert engine.steps == 4


def test_a_refused_request_is_told_and_the_others_go_on() -> None:
    told = stepped(CountingEngine(), [request("bad", tokens=0), request("good")])
    [(name, error)] = [refused for results in told.told for refused in results.refused]
    assert (name, error.reason) == ("bad", Reason.MALFORMED)
    assert told.finished == ["good"]


def test_no_step_is_taken_after_the_other_end_has_no_more_changes() -> None:
    engine = CountingEngine()
    stepped(engine, [request("a", tokens=9)], [], None)
    assert (engine.steps, engine.running) == (2, 1)
    stepped(engine, None)
    assert engine.steps == 2


def test_an_idle_engine_takes_no_step_and_is_told_of_nothing_else() -> None:
    engine = CountingEngine()
    told = stepped(engine, [], ["unknown"])
    assert engine.steps == 0
    assert all(not results.finished and not results.steps for results in told.told)


def test_steps_in_which_nothing_ends_are_told_now_and_then_and_none_is_left_out() -> None:
    told = stepped(CountingEngine(), [request("a", tokens=10)])
    assert [results.steps for results in told.told] == [4, 4, 2]
    told = stepped(CountingEngine(), [request("a", tokens=10)], [], [], None)
    assert [results.steps for results in told.told] == [3]


def test_an_engine_whose_process_has_ended_refuses_no_request() -> None:
    class Ended(CountingEngine):
        def add(self, request: GenerationRequest) -> None:
            raise EngineEndedError("gone")

    with pytest.raises(EngineEndedError):
        stepped(Ended(), [request("a")])


def test_an_engine_that_runs_elsewhere_steps_there() -> None:
    class Elsewhere(CountingEngine):
        def step_on(self, exchange: Scripted) -> None:
            exchange.tell(StepResults(steps=7))

    told = Scripted([request("a")])
    step_on(cast(Engine, Elsewhere()), told)
    assert [results.steps for results in told.told] == [7]
