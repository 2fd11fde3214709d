"""Reads what a grader returned as rewards and metrics; errors name the grader and the completion.

number                    a reward
None                      the grader abstains: the completion has no reward, and teaches nothing
(number or None, {name: number or None})
                          the same, with metrics
a coroutine of any of these: all completions of a group are awaited together
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from node.grading.completion import CompletionText, GraderOutageError
from node.values.limits import METRIC_VALUE, REWARD

RULE: Final = "return a number, None to abstain, or (number, {name: number})"


class CompletionError(Exception):
    """A grader raised for one completion, or returned something else than a reward.

    Attributes:
        number: the completion.
        returned: what it returned, in words; empty: it raised this error's cause.
    """

    def __init__(self, number: int, returned: str = "") -> None:
        super().__init__(returned)
        self.number = number
        self.returned = returned


def grade_each(grade: Callable[[CompletionText], Any], completions: Sequence[CompletionText]) -> list[Any]:
    """Return what ``grade`` returns for each completion, which may be a coroutine.

    Raises:
        CompletionError: it raised.
        GraderOutageError: it raised this.
    """
    returned = []
    for number, completion in enumerate(completions):
        try:
            returned.append(grade(completion))
        except GraderOutageError:
            raise
        except Exception as error:
            # Whatever the grader's own code raises is reported for this completion.
            raise CompletionError(number) from error
    return returned


def awaited(returned: Sequence[Any]) -> list[Any]:
    """Return the same with each coroutine's result in its place.

    Raises:
        CompletionError: a coroutine raised; of several, the first.
        GraderOutageError: a coroutine raised this.
    """
    if not any(inspect.isawaitable(each) for each in returned):
        return list(returned)
    results = asyncio.run(_together(returned))
    for number, result in enumerate(results):
        if isinstance(result, GraderOutageError):
            raise result
        if isinstance(result, BaseException):
            raise CompletionError(number) from result
    return results


def rewards_and_metrics(
    returned: Sequence[Any],
) -> tuple[list[float | None], dict[str, list[float | None]]]:
    """Return a reward for each completion, and each metric's numbers by name; None where there is none.

    Raises:
        CompletionError: what was returned for a completion is neither.
    """
    split = [_split(number, each) for number, each in enumerate(returned)]
    names = sorted({name for _, metrics in split for name in metrics})
    return (
        [reward for reward, _ in split],
        {name: [metrics.get(name) for _, metrics in split] for name in names},
    )


async def _together(returned: Sequence[Any]) -> list[Any]:
    async def result(each: Any) -> Any:
        return await each if inspect.isawaitable(each) else each

    pending: list[Awaitable[Any]] = [result(each) for each in returned]
    return await asyncio.gather(*pending, return_exceptions=True)


def _split(number: int, returned: Any) -> tuple[float | None, dict[str, float | None]]:
    reward: Any = returned
    metrics: Mapping[Any, Any] = {}
    if isinstance(returned, tuple):
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise CompletionError(number, f"{returned!r:.100}")
        reward, metrics = returned
    return (
        _number(number, reward, "a reward", most=REWARD),
        {
            str(name): _number(number, value, f"metric {name!r:.50}", most=METRIC_VALUE)
            for name, value in metrics.items()
        },
    )


def _number(completion: int, value: Any, what: str, *, most: float) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text")
        number = float(value.item() if hasattr(value, "item") else value)  # an array or tensor of one number
    except (TypeError, ValueError, RuntimeError) as error:
        described = f"{value!r:.100} ({type(value).__name__}) as {what}"
        raise CompletionError(completion, described) from error
    if not abs(number) <= most:
        raise CompletionError(
            completion, f"{number:g} as {what}, which must be within -{most:g} and {most:g}"
        )
    return number
