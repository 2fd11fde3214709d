"""An engine in a process of its own, driven from here: the same calls, and words through shared memory.

    sampler                                        engine's process
    add, cancel, step, settle, serve ------------> the engine, which does nothing unasked
    step_on --> changes of requests, halt -------> steps until it is halted
       ^------- results <------------------------'
    move frames ---------------------------------> its live words, at any time
         '------- shared memory ---------'

The process takes no step unless it is told to, so all that holds of an engine here holds of one there. An
answer, or results, that take longer than the limit mean that it hangs: it is killed with all it started.
Threads that wait for an answer of a process that has ended get an ``EngineEndedError``.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Final

from node.errors import ConfigError, StartupError
from node.telemetry.printed_lines import PrintedLines
from node.weights.format.layout import Layout, TensorSpec
from sampler.engines.engine import EngineSettings, EngineUse, GenerationRequest
from sampler.engines.own_process.messages import (
    Message,
    error_from,
    integers_from,
    receive,
    request_from,
    results_from,
    send,
)
from sampler.engines.restartable_engine import EngineEndedError
from sampler.engines.stepping import StepExchange
from sampler.engines.text.model_tokenizer import tokenizer_of
from sampler.engines.words.frame_memory import mapped, unnamed_frame_memory
from sampler.engines.words.model_words import THREADS
from sampler.engines.words.shared_words import SharedWords
from sampler.process_tree import kill_tree

LOAD_LIMIT_S: Final = 3600.0
"""Longest time to load a model: hundreds of gigabytes from a slow disk, and compiling."""

CLOSE_LIMIT_S: Final = 10.0
"""Longest wait for a process to end that was asked to. Then it is killed, which loses nothing."""

PRINTED_LIMIT_S: Final = 1.0
"""Longest wait for the end of what a process printed that has ended: a child of its own may hold the pipe."""

Say = Callable[[Message], None]
Hear = Callable[[str], Message]
"""Takes what the process is to do meanwhile, for an error."""


class ProcessEngine:
    """See ``sampler.engines.engine.Engine``.

    Attributes:
        process_id: The process, whose descendants are the engine's too.
    """

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
        self.tokenizer = tokenizer_of(settings.model_dir)
        memory = unnamed_frame_memory(slots=THREADS)
        self._process = _Process(memory, limit_s=step_limit_s)
        self.process_id = self._process.process_id
        try:
            description = self._process.ask(0, _told(name, settings), limit_s=LOAD_LIMIT_S)
        except EngineEndedError as error:
            self._process.end(limit_s=0)
            raise StartupError(f"the engine did not load: {error}", fix="See what it printed.") from error
        except (ConfigError, StartupError):
            self._process.end(limit_s=CLOSE_LIMIT_S)
            raise
        finally:
            rooms = mapped(memory, workers=1)
        self.layout = Layout.of(
            TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in description["tensors"]
        )
        assert self.layout.digest.hex() == description["layout_digest"]
        self.probe = integers_from(description["probe"])
        self._step_limit_s = step_limit_s
        self.weights = SharedWords(
            self.layout,
            rooms,
            move=lambda moves: self._process.ask(1, {"call": "move", "moves": moves}, limit_s=step_limit_s),
            settle=lambda: self._call({"call": "settle"}),
        )
        self.running = self.waiting = 0
        self.use = EngineUse()

    def add(self, request: GenerationRequest) -> None:
        self._call({"call": "add", "request": request})

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._call({"call": "cancel", "request_ids": list(request_ids)})

    def step(self) -> list[GenerationRequest]:
        return [request_from(fields) for fields in self._call({"call": "step"})["finished"]]

    def step_on(self, exchange: StepExchange) -> None:
        if (changes := exchange.changes(running=self.running)) is None:
            return
        with self._process.talk(0, limit_s=self._step_limit_s) as (say, hear):
            say({"call": "step_on"})
            is_last = False
            while not is_last:
                if changes:
                    say({"call": "change", "changes": changes})
                reply = hear("step")
                is_last = reply.get("is_last", False)
                self._note_counts(reply)
                exchange.tell(results_from(reply))
                if changes is not None and (changes := exchange.changes(running=self.running)) is None:
                    say({"call": "halt"})

    def serve(self, version: int) -> None:
        self._call({"call": "serve", "version": version})

    def close(self) -> None:
        self.running = self.waiting = 0
        del self.weights
        self._process.end(limit_s=CLOSE_LIMIT_S)

    def _call(self, message: Message) -> Message:
        """Ask the process for what its main thread does; see ``_Process.ask`` for errors."""
        reply = self._process.ask(0, message, limit_s=self._step_limit_s)
        self._note_counts(reply)
        return reply

    def _note_counts(self, reply: Message) -> None:
        self.running, self.waiting = reply["running"], reply["waiting"]
        self.use = EngineUse(**reply["use"])


class _Process:
    """The process, and its two connections: for calls, and for moves of frames."""

    def __init__(self, memory: int, *, limit_s: float) -> None:
        self._ending = threading.Lock()
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        for end in ours:
            # A process that is stopped half way through a message reads and writes no more of it.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, _timeval(limit_s))
        descriptors = [memory, *(end.fileno() for end in theirs)]
        reading, printed = os.pipe()
        try:
            self._process = Popen(
                [sys.executable, "-m", "sampler.engines.own_process.engine_worker", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=DEVNULL,
                stdout=printed,
                stderr=printed,
                # It can import what this process can: an engine of one's own may live outside site-packages.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # A process group of its own, so that what it starts ends with it.
                start_new_session=True,
            )
        except OSError:
            os.close(memory)
            os.close(reading)
            for end in ours:
                end.close()
            raise
        finally:
            os.close(printed)
            for end in theirs:
                end.close()
        self._printing = threading.Thread(
            target=_log_printed, args=(reading,), name="engine prints", daemon=True
        )
        self._printing.start()
        self._channels = [(Connection(end.detach()), threading.Lock()) for end in ours]
        self.process_id: int = self._process.pid

    def ask(self, channel: int, message: Message, *, limit_s: float) -> Message:
        """Ask a question over one of the connections and return the answer; errors as of ``talk``."""
        with self.talk(channel, limit_s=limit_s) as (say, hear):
            say(message)
            return hear(message.get("call", "load"))

    @contextlib.contextmanager
    def talk(self, channel: int, *, limit_s: float) -> "Iterator[tuple[Say, Hear]]":
        """Lend one of the connections: what sends a message, and what returns the next one.

        Both raise:
            EngineEndedError: the process has ended, or was killed because it sent nothing in time.
            HeteroRLError, ValueError, RuntimeError: see ``error_from``.
        """
        connection, is_busy = self._channels[channel]

        def say(message: Message) -> None:
            try:
                send(connection, message)
            except OSError as error:
                raise self._ended() from error

        def hear(what: str) -> Message:
            try:
                if not connection.poll(limit_s):
                    raise EngineEndedError(
                        f"the engine's process took longer than {limit_s:g} s to {what}, and was killed: "
                        f"{self._kill()}"
                    )
                reply = receive(connection)
            except (EOFError, OSError) as error:
                raise self._ended() from error
            if "error" in reply:
                raise error_from(reply)
            return reply

        with is_busy:
            yield say, hear

    def _ended(self) -> EngineEndedError:
        return EngineEndedError(f"the engine's process has ended: {self._kill()}")

    def end(self, *, limit_s: float) -> None:
        """Ask it to end, kill what is left of it, and close the connections."""
        calls, _ = self._channels[0]
        with contextlib.suppress(OSError):
            send(calls, {"call": "close"})
            calls.poll(limit_s)  # until it closes its end
        self._kill()
        for connection, is_busy in self._channels:
            with is_busy:  # a thread that waits for an answer gets an error by now
                connection.close()

    def _kill(self) -> str:
        """Kill it with all it started, if it has not ended by itself; return how it ended."""
        with self._ending:
            if self._process.returncode is None:
                # While it is not waited for, nothing else can have its number.
                kill_tree(self._process.pid)
            try:
                how = f"exit code {self._process.wait(CLOSE_LIMIT_S)}"
            except TimeoutExpired:
                return "it does not end, whatever it is waiting for"
        self._printing.join(PRINTED_LIMIT_S)  # what it said last is logged before what came of it
        return how


def _log_printed(pipe: int) -> None:
    """Log what is written to a pipe until nobody has its other end, and close it."""
    printed = PrintedLines("engine")
    with os.fdopen(pipe, "rb", buffering=0) as reading:
        while chunk := reading.read(1 << 16):
            printed.feed(chunk)
    printed.end()


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
