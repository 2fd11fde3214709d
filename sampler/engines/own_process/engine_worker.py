"""The process that an engine has for itself: loads it, then does what it is asked until it is told to close.

    python -m sampler.engines.own_process.engine_worker MEMORY_FD CALLS_FD WORDS_FD...

Calls are made by the main thread, one after the other. Each of the other connections has a thread, which
copies frames between the live words and its part of the shared memory: words are read during a step, too.
That they are written between two steps only is the sampler's business.
"""

import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from node.errors import ConfigError, RefusedError, StartupError
from node.limits import FRAME_WORDS
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from sampler.engines.engine import Engine
from sampler.engines.engine_registry import load_engine
from sampler.engines.own_process.messages import (
    Arrays,
    Message,
    error_message,
    finished_message,
    packed,
    request_from,
    unpacked,
)
from sampler.engines.restartable_engine import FAULTS
from sampler.process_tree import adopt_orphans

Answer = Callable[[Message, Arrays], tuple[Message, Arrays]]

_NOTHING: Final[tuple[Message, Arrays]] = ({}, ())


@dataclass(frozen=True, slots=True)
class _Settings:
    """See ``EngineSettings``."""

    model_dir: Path
    device: str
    compute_dtype: str
    apply: str
    threads: int
    seed: int | None
    engine_options: dict[str, Any]


def main(memory_fd: int, calls_fd: int, words_fds: list[int]) -> None:
    """Serve until the sampler closes the engine or is gone."""
    adopt_orphans()
    calls = Connection(calls_fd)
    settings, _ = unpacked(calls.recv_bytes())
    name = settings.pop("engine")
    settings["model_dir"] = Path(settings["model_dir"])
    try:
        engine = load_engine(name, _Settings(**settings))
    except (ConfigError, StartupError) as error:
        calls.send_bytes(packed(error_message(error)))
        return
    room = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint16).reshape(len(words_fds), FRAME_WORDS)
    for words_fd, frame_room in zip(words_fds, room, strict=True):
        answer = partial(_moved, engine, frame_room)
        threading.Thread(target=_serve, args=(Connection(words_fd), answer), daemon=True).start()
    calls.send_bytes(packed(_description(engine)))
    _serve(calls, partial(_called, engine))
    engine.close()


def _serve(connection: Connection, answer: Answer) -> None:
    while True:
        try:
            message, arrays = unpacked(connection.recv_bytes())
        except EOFError:
            return
        if message["call"] == "close":
            return
        try:
            reply = packed(*answer(message, arrays))
        except (RefusedError, *FAULTS) as error:
            reply = packed(error_message(error))
        connection.send_bytes(reply)


def _called(engine: Engine, message: Message, arrays: Arrays) -> tuple[Message, Arrays]:
    reply, columns = _NOTHING
    match message["call"]:
        case "add":
            engine.add(request_from(message, arrays))
        case "cancel":
            engine.cancel(message["request_ids"])
        case "step":
            reply, columns = finished_message(engine.step())
        case "settle":
            engine.weights.settle()
        case "serve":
            engine.serve(message["version"])
        case unknown:
            raise ValueError(f"there is no call {unknown!r}")
    return {**reply, "running": engine.running, "waiting": engine.waiting}, columns


def _moved(engine: Engine, room: Words, message: Message, _: Arrays) -> tuple[Message, Arrays]:
    """Copy a frame between the live words and the shared memory."""
    frame = engine.layout.frames[message["frame"]]
    if message["call"] == "write":
        engine.weights.live.write(frame, room[: frame.words])
    else:
        room[: frame.words] = engine.weights.live.read(frame)
    return _NOTHING


def _description(engine: Engine) -> Message:
    layout: Layout = engine.layout
    return {
        "tensors": [[span.name, list(span.shape), span.dtype.name] for span in layout.tensors],
        "layout_digest": layout.digest.hex(),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [int(descriptor) for descriptor in sys.argv[3:]])
    # The engine is closed, and a sampler that drains waits: torch takes a while to be taken apart.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
