"""Renders chat templates in a process of its own, which is ended when one takes too long or too much memory.

    (none) --render--> started --ready--> idle <--request/reply--> busy
       ^                                                            | CPU or wall limit, died
       +------------------------------ ended -----------------------+

A template is a program that came with the model. One that loops for ever cannot be stopped in a thread: a
single expression, such as ``9 ** 9 ** 9``, never returns to Python.
"""

import json
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, Any, Final, cast

from sampler.tasks.processes.grader_process import START_TIMEOUT_S, environment
from sampler.tasks.processes.grader_worker import PROMPT_CHARACTERS

CPU_LIMIT_S: Final = 5.0
"""For one conversation. One of a million tokens takes a second."""

WALL_LIMIT_S: Final = 60.0
"""On a machine that is busy with other things, or that sleeps."""

MEMORY_BYTES: Final = 512 << 20
"""For one conversation, beyond what the process has when it starts: a hundred times the longest prompt."""


class TemplateFailedError(Exception):
    """A template did not render the messages; ``str()`` says why, after "the chat template"."""


class TemplateProcess:
    """For any thread; one conversation at a time. The process ends with this object."""

    def __init__(self, *, cpu_limit_s: float = CPU_LIMIT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., TemplateProcess] | None = None

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        opens: bool,
        what: str = "messages",
    ) -> str:
        """Return what a template writes for messages.

        Args:
            arguments: variables of the template besides the messages.
            opens: whether it is to write the beginning of the assistant's next message.
            what: the messages are, for errors.
        Raises:
            TemplateFailedError: it refuses them, writes too much, or was ended at a limit.
        """
        request = {"template": template, "messages": messages, "arguments": arguments, "opens": opens}
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            reply = self._exchanged(line)
        if (text := reply.get("text")) is not None:
            return str(text)
        if "too_long" in reply:
            most = PROMPT_CHARACTERS
            raise TemplateFailedError(f"writes {reply['too_long']} characters, at most {most} are allowed")
        if "too_large" in reply:
            raise TemplateFailedError(self._too_large())
        raise TemplateFailedError(f"refuses the {what}: {reply.get('error')}")

    def _exchanged(self, line: bytes) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        try:
            if self._process is None:
                self._start()
            assert self._process is not None
            return self._asked(self._process, line, limit_s=WALL_LIMIT_S)
        except (OSError, ValueError) as error:
            how = self._end()
            if how == -signal.SIGPROF:
                what = f"was not done after {self._cpu_limit_s:g} s of CPU time, and was ended"
            elif isinstance(error, TimeoutError):
                what = f"was not done after {error} s, and was ended"
            elif isinstance(error, MemoryError):
                what = self._too_large()
            else:
                what = f"could not be rendered: its process ended with code {how}"
            raise TemplateFailedError(what) from error

    def _too_large(self) -> str:
        return f"needs more than {self._memory_bytes >> 20} MiB of memory, and was ended"

    def _start(self) -> None:
        limits = (self._cpu_limit_s, self._memory_bytes, PROMPT_CHARACTERS)
        self._process = Popen(
            [sys.executable, "-m", "sampler.engines.text.template_worker", *map(str, limits)],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=environment(()) | {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._asked(self._process, b"", limit_s=START_TIMEOUT_S)

    def _asked(self, process: "Popen[bytes]", line: bytes, *, limit_s: float) -> dict[str, Any]:
        """Return the answer to a request; OSError or ValueError if there is none, TimeoutError if late."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            requests, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
            requests.write(line)
            requests.flush()
            answer = answers.readline()
        except OSError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            raise TimeoutError(f"{limit_s:.0f}") if is_late.is_set() else BrokenPipeError()
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _end(self) -> int | None:
        """End the process; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        if self._finalizer is not None:
            self._finalizer.detach()
        return _end(process)


def _end(process: "Popen[bytes]") -> int | None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            assert pipe is not None
            pipe.close()
    return process.wait()
