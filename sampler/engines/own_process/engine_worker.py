"""The process that an engine has for itself: loads it, then does what it is asked until it is told to close.

    python -m sampler.engines.own_process.engine_worker MEMORY_FD CALLS_FD MOVES_FD

Calls are made by the main thread, one after the other; another one receives them, so that the sampler can
always send. Other threads copy frames between the live words and the shared memory: words are read during a
step, too. That they are written between two steps only is the sampler's business.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast

from node.errors import ConfigError, RefusedError, StartupError
from sampler.engines.engine import Engine, EngineSettings
from sampler.engines.engine_registry import load_engine
from sampler.engines.own_process.messages import (
    Message,
    changes_from,
    error_message,
    receive,
    request_from,
    results_message,
    send,
)
from sampler.engines.restartable_engine import FAULTS
from sampler.engines.stepping import RequestChange, StepResults, step_on
from sampler.engines.words.frame_memory import Rooms, mapped
from sampler.engines.words.shared_words import move_frames
from sampler.process_tree import adopt_orphans


def main(memory_fd: int, calls_fd: int, moves_fd: int) -> None:
    """Serve until the sampler closes the engine or is gone."""
    adopt_orphans()
    calls = Connection(calls_fd)
    settings = receive(calls)
    settings["model_dir"] = Path(settings["model_dir"])
    try:
        engine = load_engine(settings.pop("engine"), cast(EngineSettings, SimpleNamespace(**settings)))
    except (ConfigError, StartupError) as error:
        send(calls, error_message(error))
        return
    rooms = mapped(memory_fd, workers=1)
    answer = partial(_moved, engine, rooms, ThreadPoolExecutor(len(rooms)))
    moves = Connection(moves_fd)
    threading.Thread(target=_serve, args=(partial(_next, moves), moves, answer), daemon=True).start()
    tensors = [(span.name, span.shape, span.dtype.name) for span in engine.layout.tensors]
    layout_digest = engine.layout.digest.hex()
    send(calls, {"tensors": tensors, "layout_digest": layout_digest, "probe": engine.probe})
    received: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_receive_all, args=(calls, received), daemon=True).start()
    _serve(received.get, calls, partial(_called, engine, _SamplerExchange(engine, calls, received)))
    engine.close()


def _next(connection: Connection) -> Message:
    """Return the next message; ``close`` if the sampler is gone."""
    try:
        return receive(connection)
    except EOFError:
        return {"call": "close"}


def _receive_all(connection: Connection, received: SimpleQueue[Message]) -> None:
    while (message := _next(connection)).get("call") != "close":
        received.put(message)
    received.put(message)


def _serve(hear: Callable[[], Message], connection: Connection, answer: Callable[[Message], Message]) -> None:
    while (message := hear())["call"] != "close":
        try:
            reply = answer(message)
        except (RefusedError, *FAULTS) as error:
            reply = error_message(error)
        send(connection, reply)


def _called(engine: Engine, exchange: "_SamplerExchange", message: Message) -> Message:
    reply: Message = {}
    match message["call"]:
        case "add":
            engine.add(request_from(message["request"]))
        case "cancel":
            engine.cancel(message["request_ids"])
        case "step":
            reply = {"finished": engine.step()}
        case "step_on":
            step_on(engine, exchange)
            reply = {**results_message(StepResults()), "is_last": True}
        case "settle":
            engine.weights.settle()
        case "serve":
            engine.serve(message["version"])
        case unknown:
            raise ValueError(f"there is no call {unknown!r}")
    return {**reply, **_counts(engine)}


def _counts(engine: Engine) -> Message:
    return {"running": engine.running, "waiting": engine.waiting, "use": engine.use}


class _SamplerExchange:
    """The sampler at the other end of ``step_on``, which it is told to begin and to end."""

    def __init__(self, engine: Engine, connection: Connection, received: SimpleQueue[Message]) -> None:
        self._engine = engine
        self._connection = connection
        self._received = received

    def changes(self, *, running: int) -> Sequence[RequestChange] | None:
        if running and self._received.empty():
            return ()
        match message := self._received.get():
            case {"call": "change"}:
                return changes_from(message)
            case {"call": "close"}:
                self._received.put(message)
        return None

    def tell(self, results: StepResults) -> None:
        send(self._connection, {**results_message(results), **_counts(self._engine)})


def _moved(engine: Engine, rooms: Rooms, threads: Executor, message: Message) -> Message:
    words, layout = engine.weights.live, engine.layout
    moves = message["moves"].split(",")
    list(threads.map(lambda move: move_frames(move, words, layout, rooms, worker=0), moves))
    return {}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    # The engine is closed, and a sampler that drains waits: torch takes a while to be taken apart.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
