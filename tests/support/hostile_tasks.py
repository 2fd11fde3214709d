"""A task whose grader does harm, in the way that its option names; prompt and other gradings are fine."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable

MEBIBYTE = 1 << 20


class Hostile:
    prompts = 10

    def __init__(self, *, harm: str) -> None:
        self._harm: Callable[[], None] = getattr(self, f"_{harm}")

    def prompt(self, index: int) -> str:
        return f"{index}="

    def grade(self, index: int, text: str) -> float:
        if index == 1:
            self._harm()
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

    def _fork_and_return(self) -> None:
        """Two processes that would both answer."""
        os.fork()

    def _memory(self) -> None:
        kept = []
        while True:
            kept.append(b"x" * (64 * MEBIBYTE))

    def _segfault(self) -> None:
        ctypes.string_at(0)

    def _exit(self) -> None:
        sys.exit(0)

    def _close(self) -> None:
        os.closerange(0, 64)

    def _output(self) -> None:
        """A gigabyte on standard output and as much again on standard error."""
        for descriptor in (1, 2):
            for _ in range(1024):
                left = memoryview(bytes(MEBIBYTE))
                while left:
                    left = left[os.write(descriptor, left) :]

    def _regex(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "!")
