"""Compares formulas by the package ``math-verify`` in a child process, within a budget for a whole group.

Some formulas take for ever, a few of them inside one step of the interpreter, which no signal handler
interrupts: 9^(9^(9^9)). The kernel ends the child when one takes more than its share of the budget, and
another goes on with the rest. What is left at the end is shared among those that were cut off.

The budget is processor time, so that a busy machine cuts off no more than an idle one.
"""

import logging
import os
import re
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Final

BASE_S: Final = 1.0
"""Processor time for a group of any size: an honest comparison that is hard takes some tenths of a second."""
EACH_S: Final = 0.05
"""And for each of its formulas: to read and compare an ordinary one takes 5 to 20 ms."""
MOST_S: Final = 10.0
"""Processor time for the largest groups."""
PATIENCE: Final = 8.0
"""Times its processor time that a group may take by the clock, where others keep the machine busy."""
MOST_WALL_S: Final = 20.0
"""But no longer than this, of the 30 s that ``grader_wall_limit_s`` is by default."""

_FUNCTION: Final = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|pi)(?![A-Za-z])")
"""Functions as they are written outside of LaTeX, in which sin is s times i times n."""

Pair = tuple[str, str]
"""A right formula and one that is given."""

_YES, _NO = b"1", b"0"

_WARMING: Final = (
    ("x=1", "x=2"),
    ("y=2x+3", "y=3x+2"),
    (r"x \le 2", r"(-\infty,2]"),
    (r"\{1,2\}", r"\{2,3\}"),
    (r"(1,\frac{1}{2})", r"(1,-\sqrt{2})"),
    ("(x+1)^2", "x^2+2x+2"),
    (r"\sin^2 x", r"\log_2 3"),
    (r"30^\circ", r"\frac{\pi}{6}"),
    ("e^{2i}", "-2.5"),
    (r"(1,3)\cup(4,5)", "(1,3)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
)
"""Comparisons of each kind, after which most take 5 to 20 ms in place of 50 to 250."""

_LEAST_S: Final = 0.01
"""A timer of 0 would be none."""


@dataclass(slots=True)
class _Budget:
    cpu_s: float
    ends_at_s: float
    """By ``time.monotonic()``."""

    @property
    def is_spent(self) -> bool:
        return self.cpu_s < _LEAST_S or time.monotonic() > self.ends_at_s


def are_worth_the_same(pairs: Sequence[Pair]) -> dict[Pair, bool | None]:
    """Return for each pair whether its formulas are worth the same; None: it was cut off."""
    left = list(dict.fromkeys(pairs))
    verdicts: dict[Pair, bool | None] = dict.fromkeys(left)
    if not left:
        return verdicts
    warm()
    cpu_s = min(BASE_S + EACH_S * len(left), MOST_S)
    budget = _Budget(cpu_s, time.monotonic() + min(PATIENCE * cpu_s, MOST_WALL_S))
    for _ in range(2):
        at = 0
        while at < len(left) and not budget.is_spent:
            done = _compared(left[at:], budget)
            verdicts |= dict(zip(left[at:], done, strict=False))
            at += len(done)
        left = [pair for pair in left if verdicts[pair] is None]
    return verdicts


def _compared(pairs: Sequence[Pair], budget: _Budget) -> list[bool | None]:
    """Compare pairs in one child until one takes too long, which is the last that is returned, as None."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        _serve(pairs, theirs, budget.cpu_s)
    done: list[bool | None] = []
    try:
        os.close(theirs)
        while len(done) < len(pairs):
            ready, _, _ = select.select([ours], [], [], max(0.0, budget.ends_at_s - time.monotonic()))
            said = os.read(ours, 1) if ready else b""
            done.append(None if said == b"" else said == _YES)
            if said == b"":
                break  # too slow, or out of memory
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
        budget.cpu_s -= used.ru_utime + used.ru_stime
    return done


def _serve(pairs: Sequence[Pair], pipe: int, cpu_s: float) -> None:
    """Write a byte for each pair, in the child, which ends within an equal share of the time for each."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        began_s = time.process_time()
        for at, (right, given) in enumerate(pairs):
            share_s = (cpu_s - time.process_time() + began_s) / (len(pairs) - at)
            signal.setitimer(signal.ITIMER_PROF, max(_LEAST_S, share_s))
            os.write(pipe, _YES if _is_worth_the_same(right, given) else _NO)
    finally:
        os._exit(0)


def _is_worth_the_same(right: str, given: str) -> bool:
    from math_verify import verify

    gold = _parsed(right)
    return bool(gold) and bool(verify(gold, _parsed(given), timeout_seconds=None))


def _parsed(formula: str) -> list[object]:
    """Return what is read of a formula, both of right ones and of given ones; empty: nothing."""
    from math_verify import parse

    text = _FUNCTION.sub(r"\\\1", formula.replace("$", "").replace("\\%", "%").replace("%", "\\%"))
    found: list[object] = parse(f"${text}$", fallback_mode="no_fallback", parsing_timeout=None)
    return found


@cache
def warm() -> None:
    """Import the package and fill its tables here, once, for all children."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit itself
    for right, given in _WARMING:
        _is_worth_the_same(right, given)
