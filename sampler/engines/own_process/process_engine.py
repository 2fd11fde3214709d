"""An engine in a process of its own, driven from here: the same calls, and words through shared memory.

    sampler                               engine's process
    add, cancel, step, settle, serve ---> the engine, which does nothing unasked
    read, write a frame ----------------> its live words, at any time, several at once
             '--- shared memory -----'

The process takes no step unless it is told to, so all that holds of an engine here holds of one there. A call
that takes longer than the limit means that it hangs: it is killed with all it started. Whoever waits for an
answer of a process that has ended gets an ``EngineEndedError``.
"""

import contextlib
import mmap
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Final

import numpy as np

from node.errors import ConfigError, StartupError
from node.limits import FRAME_WORDS
from node.weights.format.digests import Words
from node.weights.format.layout import FrameSpan, Layout, TensorSpec
from sampler.engines.engine import EngineSettings, FinishedRequest, GenerationRequest
from sampler.engines.model_tokenizer import ModelTokenizer
from sampler.engines.model_words import THREADS
from sampler.engines.own_process.messages import (
    Arrays,
    Message,
    error_from,
    finished_from,
    packed,
    request_message,
    unpacked,
)
from sampler.engines.restartable_engine import EngineEndedError
from sampler.process_tree import kill_tree

LOAD_LIMIT_S: Final = 3600.0
"""Longest time to load a model: hundreds of gigabytes from a slow disk, and compiling."""

CLOSE_LIMIT_S: Final = 10.0
"""Longest wait for a process to end that was asked to. Then it is killed, which loses nothing."""

_FRAME_BYTES: Final = 2 * FRAME_WORDS


class ProcessEngine:
    """See ``sampler.engines.engine.Engine``."""

    def __init__(self, name: str, settings: EngineSettings, *, step_limit_s: float) -> None:
        """Start a process and load an engine in it.

        Args:
            name: of the engine; see ``engine_registry``.
            step_limit_s: Longest time of one call.
        Raises:
            ConfigError, StartupError: the engine's, or the process did not start.
        """
        if settings.apply == "spare":
            raise StartupError(
                "an engine in a process of its own has new versions written over the old one",
                fix='Leave sampler.apply out, or set sampler.engine_process = "inside".',
            )
        self._tokenizer = ModelTokenizer(settings.model_dir)
        self._process = _Process(words_channels=THREADS, limit_s=step_limit_s)
        try:
            description = self._process.calls.ask(_told(name, settings), limit_s=LOAD_LIMIT_S)[0]
        except EngineEndedError as error:
            self._process.end(limit_s=0)
            raise StartupError(f"the engine did not load: {error}", fix="See what it printed.") from error
        except (ConfigError, StartupError):
            self._process.end(limit_s=CLOSE_LIMIT_S)
            raise
        self._layout = Layout.of(
            TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in description["tensors"]
        )
        assert self._layout.digest.hex() == description["layout_digest"]
        self._step_limit_s = step_limit_s
        self._weights = _ProcessWords(self)
        self._running = self._waiting = 0

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def weights(self) -> "_ProcessWords":
        return self._weights

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._tokenizer

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def process_id(self) -> int:
        """The process, whose descendants are the engine's too."""
        return self._process.process_id

    def add(self, request: GenerationRequest) -> None:
        self.call(*request_message(request))

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.call({"call": "cancel", "request_ids": list(request_ids)})

    def step(self) -> list[FinishedRequest]:
        return finished_from(*self.call({"call": "step"}))

    def serve(self, version: int) -> None:
        self.call({"call": "serve", "version": version})

    def close(self) -> None:
        self._running = self._waiting = 0
        del self._weights
        self._process.end(limit_s=CLOSE_LIMIT_S)

    def call(self, message: Message, arrays: Arrays = ()) -> tuple[Message, Arrays]:
        """Ask the process for what its main thread does.

        Raises:
            EngineEndedError: the process has ended, or was killed because it did not answer in time.
            RefusedError, ValueError, RuntimeError: the engine raised it, or something like it.
        """
        reply, columns = self._process.calls.ask(message, arrays, limit_s=self._step_limit_s)
        self._running, self._waiting = reply["running"], reply["waiting"]
        return reply, columns

    @contextlib.contextmanager
    def moving(self) -> Iterator["_WordsChannel"]:
        """Borrow a channel for words, waiting for one to be free."""
        channel = self._process.words.get()
        try:
            yield channel
        finally:
            self._process.words.put(channel)

    def move(self, channel: "_WordsChannel", call: str, frame: int) -> None:
        """Copy a frame between the process's live words and the shared memory."""
        channel.ask({"call": call, "frame": frame}, limit_s=self._step_limit_s)


class _ProcessWords:
    """The live words, as ``LiveWords`` and ``ModelWords``: there are no others."""

    spares = None

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine = engine
        self._numbers = {frame.start_word: number for number, frame in enumerate(engine.layout.frames)}

    @property
    def live(self) -> "_ProcessWords":
        return self

    def settle(self) -> None:
        self._engine.call({"call": "settle"})

    def read(self, frame: FrameSpan) -> Words:
        with self._engine.moving() as channel:
            self._engine.move(channel, "read", self._numbers[frame.start_word])
            words: Words = channel.room[: frame.words].copy()
        return words

    def write(self, frame: FrameSpan, words: Words) -> None:
        with self._engine.moving() as channel:
            channel.room[: frame.words] = words
            self._engine.move(channel, "write", self._numbers[frame.start_word])

    def memory(self, frame: FrameSpan) -> Words | None:
        return None


class _Channel:
    """One question at a time to the process, and its answer."""

    def __init__(self, process: "_Process", connection: Connection) -> None:
        self._process = process
        self.connection = connection

    def ask(self, message: Message, arrays: Arrays = (), *, limit_s: float) -> tuple[Message, Arrays]:
        try:
            self.connection.send_bytes(packed(message, arrays))
            if not self.connection.poll(limit_s):
                what = f"took longer than {limit_s:g} s to {message.get('call', 'load')}"
                raise EngineEndedError(f"the engine's process {what}, and was killed: {self._process.kill()}")
            reply, columns = unpacked(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineEndedError(f"the engine's process has ended: {self._process.kill()}") from error
        if "error" in reply:
            raise error_from(reply)
        return reply, columns


class _WordsChannel(_Channel):
    """A channel with room for a frame in the shared memory."""

    def __init__(self, process: "_Process", connection: Connection, room: Words) -> None:
        super().__init__(process, connection)
        self.room = room


class _Process:
    """The process, its connections and the shared memory."""

    def __init__(self, *, words_channels: int, limit_s: float) -> None:
        self._ending = threading.Lock()
        ours, theirs = zip(*(socket.socketpair() for _ in range(1 + words_channels)), strict=True)
        for end in ours:
            # A process that is stopped half way through a message reads and writes no more of it.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, _timeval(limit_s))
        # Without a name, nothing of it is left when both processes are gone.
        memory = os.memfd_create("heterorl-frames")
        os.ftruncate(memory, words_channels * _FRAME_BYTES)
        descriptors = [memory, *(end.fileno() for end in theirs)]
        self._process = Popen(
            [sys.executable, "-m", "sampler.engines.own_process.engine_worker", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=DEVNULL,
            # It can import what this process can: an engine of one's own may live outside site-packages.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            # A process group of its own, so that what it starts ends with it.
            start_new_session=True,
        )
        room = np.frombuffer(mmap.mmap(memory, 0), np.uint16).reshape(words_channels, FRAME_WORDS)
        os.close(memory)
        for end in theirs:
            end.close()
        calls, *words = (Connection(end.detach()) for end in ours)
        self.calls = _Channel(self, calls)
        self._channels = [_WordsChannel(self, *pair) for pair in zip(words, room, strict=True)]
        self.words: queue.SimpleQueue[_WordsChannel] = queue.SimpleQueue()
        for channel in self._channels:
            self.words.put(channel)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def kill(self) -> str:
        """Kill it with all it started, if it has not ended by itself; return how it ended."""
        with self._ending:
            if self._process.returncode is None:
                # While it is not waited for, nothing else can have its number.
                kill_tree(self._process.pid)
            try:
                return f"exit code {self._process.wait(CLOSE_LIMIT_S)}"
            except TimeoutExpired:
                return "it does not end, whatever it is waiting for"

    def end(self, *, limit_s: float) -> None:
        """Ask it to end, kill what is left of it, and close the connections."""
        with contextlib.suppress(OSError):
            self.calls.connection.send_bytes(packed({"call": "close"}))
            self.calls.connection.poll(limit_s)  # until it closes its end
        self.kill()
        self.calls.connection.close()
        for _ in self._channels:
            # Whoever has one gets an error by now, and returns it.
            self.words.get().connection.close()
        for channel in self._channels:
            # Whoever comes later gets an error too, and does not wait for ever.
            self.words.put(channel)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int(1e6 * (seconds - whole)))


def _told(name: str, settings: EngineSettings) -> Message:
    return {
        "engine": name,
        "model_dir": str(settings.model_dir),
        "device": settings.device,
        "compute_dtype": settings.compute_dtype,
        "apply": "in_place",
        "threads": settings.threads,
        "seed": settings.seed,
        "engine_options": dict(settings.engine_options),
    }
