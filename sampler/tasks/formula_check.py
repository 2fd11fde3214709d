"""Compares formulas by the package ``math-verify`` in a child process, within a budget for a whole group.

Some formulas take for ever, a few of them inside one step of the interpreter, which no signal interrupts:
9^(9^(9^9)), 1000000!. The child is killed when one takes more than its share of the budget, and another goes
on with the rest; what is left of the budget at the end is shared among those that were cut off.
"""

import os
import re
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

BASE_S: Final = 1.0
"""Budget of a group, whatever its size: a hard comparison that is honest takes some tenths of a second."""
EACH_S: Final = 0.05
"""And of each of its formulas: parsing and comparing an ordinary one takes 5 to 20 ms."""
MOST_S: Final = 10.0
"""Budget of the largest groups, a third of the default ``grader_wall_limit_s``."""

_FUNCTION: Final = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|pi)(?![A-Za-z])")
"""Functions as they are written outside of LaTeX, in which sin is s times i times n."""

Pair = tuple[str, str]
"""A right formula and one that is given."""

_YES, _NO = b"1", b"0"


def are_worth_the_same(pairs: Sequence[Pair]) -> dict[Pair, bool | None]:
    """Return for each pair whether its formulas are worth the same; None: it was cut off."""
    left = list(dict.fromkeys(pairs))
    verdicts: dict[Pair, bool | None] = dict.fromkeys(left)
    if not left:
        return verdicts
    _warm()
    deadline_s = time.monotonic() + min(BASE_S + EACH_S * len(left), MOST_S)
    for _ in range(2):
        verdicts |= _first_look(left, deadline_s)
        left = [pair for pair in left if verdicts[pair] is None]
    return verdicts


def _first_look(pairs: Sequence[Pair], deadline_s: float) -> dict[Pair, bool | None]:
    """Compare each pair within an equal share of the time that is left when its turn comes."""
    verdicts: dict[Pair, bool | None] = {}
    at = 0
    while at < len(pairs) and time.monotonic() < deadline_s:
        done = _compared(pairs[at:], deadline_s)
        verdicts |= dict(zip(pairs[at:], done, strict=False))
        at += len(done)
    return verdicts


def _compared(pairs: Sequence[Pair], deadline_s: float) -> list[bool | None]:
    """Compare pairs in one child until one takes too long, which is the last that is returned, as None."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        _serve(pairs, theirs)
    done: list[bool | None] = []
    try:
        os.close(theirs)
        while len(done) < len(pairs):
            left_s = deadline_s - time.monotonic()
            share_s = left_s / (len(pairs) - len(done))
            ready, _, _ = select.select([ours], [], [], max(0.0, share_s))
            said = os.read(ours, 1) if ready else b""
            done.append(None if said == b"" else said == _YES)
            if said == b"":
                break  # too slow, or out of memory
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return done


def _serve(pairs: Sequence[Pair], pipe: int) -> None:
    """Write a byte for each pair, in the child."""
    try:
        for right, given in pairs:
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


def _warm() -> None:
    """Import the package and fill its parser's tables here, once, for all children."""
    global _is_warm
    if not _is_warm:
        import logging

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit itself
        for formula in (r"\frac{1}{2}", "x^2+1", "(1,2)", r"\{1, 2\}", r"\sqrt{2}\pi", r"x \le 3", "-2.5"):
            _is_worth_the_same(formula, formula)
        _is_warm = True


_is_warm = False
