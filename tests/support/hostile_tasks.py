"""A task whose grader does harm, in the way that a completion names; prompts and other gradings are fine."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

from sampler.tasks.task import CompletionText

MEBIBYTE = 1 << 20


class Hostile:
    prompts = 10

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        if index == 1:
            getattr(self, f"_{completion.text}")()
        return 1.0

    def _loop(self) -> None:
        while True:
            pass

    def _swallow(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGALRM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(3600)

    def _fork_bomb(self) -> None:
        """Sixty-four processes, half of them in sessions of their own, that would go on for ever."""
        for turn in range(6):
            if os.fork() == 0 and turn % 2:
                os.setsid()
        while True:
            time.sleep(3600)

    def _daemon(self) -> None:
        """One process that has left its group and its parent."""
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            while True:
                time.sleep(3600)
        os.waitpid(child, 0)
        time.sleep(3600)

    def _daemon_and_exit(self) -> None:
        """As ``daemon``, and the grader itself is gone."""
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(3600)
        os._exit(0)

    def _orphans(self) -> None:
        """Sixty-four processes that end as nobody's children."""
        subprocess.run("for i in $(seq 64); do (true &); done", shell=True, check=True)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _message(self) -> None:
        raise ValueError("x" * (2048 * MEBIBYTE))

    def _recursion(self) -> None:
        self._recursion()

    def _threads(self) -> None:
        """Threads that compute and print for as long as the process lives."""
        for harm in (self._loop, self._print):
            threading.Thread(target=harm, daemon=True).start()

    def _print(self) -> None:
        while True:
            os.write(1, bytes(MEBIBYTE))

    def _patch(self) -> None:
        """Replace the function that writes the answer."""
        json.dumps = lambda *_, **__: "[]"

    def _answer(self) -> None:
        """An answer to this request and to the next, wherever answers go."""
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b'{"rewards": [9.0], "metrics": {}}\n' * 2)

    def _fork_and_return(self) -> None:
        """Two processes that would both answer."""
        os.fork()

    def _memory(self) -> None:
        kept = []
        while True:
            kept.append(b"x" * (64 * MEBIBYTE))

    def _exit(self) -> None:
        sys.exit(0)

    def _close(self) -> None:
        os.closerange(0, 64)

    def _output(self) -> None:
        """32 MiB on standard output and as much again on standard error."""
        for descriptor in (1, 2):
            for _ in range(32):
                left = memoryview(bytes(MEBIBYTE))
                while left:
                    left = left[os.write(descriptor, left) :]

    def _regex(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "!")


class Leaving:
    """Its process ends once it has answered."""

    prompts = 10

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        threading.Timer(0.1, os._exit, (1,)).start()
        return 1.0
