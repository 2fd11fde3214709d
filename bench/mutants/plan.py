"""Which faults are drawn, which tests are run against each, and which survivors are known; pure."""

import random
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.mutants.faults import Fault

NARROW_FILES: Final = 5
"""So many files of tests are tried first: those that call the faulty function and little else."""

MOST_S: Final = 8.0
"""Of tests against one fault at each width, by their time when they were observed."""

_OUTER: Final = ("tests/integration/",)


@dataclass(frozen=True, slots=True)
class ObservedTest:
    """What was observed of one test."""

    name: str
    seconds: float
    functions: frozenset[tuple[str, str]]
    """(file, qualified name)."""

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


@dataclass(frozen=True, slots=True)
class Known:
    """A survivor that somebody looked at."""

    name: tuple[str, str, str, str]
    is_equivalent: bool
    """Nothing that anybody could observe changes; otherwise it is left for ``reason``."""
    reason: str


def known(text: str) -> dict[tuple[str, str, str, str], Known]:
    """Read a list of survivors."""
    entries = tomllib.loads(text).get("survivor", [])
    found = [
        Known(
            (
                each["module"],
                each["function"],
                " ".join(each["before"].split()),
                " ".join(each["after"].split()),
            ),
            each["kind"] == "equivalent",
            each["reason"],
        )
        for each in entries
    ]
    return {each.name: each for each in found}


def drawn(faults: Mapping[str, Sequence[Fault]], *, seed: int) -> list[Fault]:
    """Return all faults in an order of which any beginning has of each file in proportion to its size."""
    draw, ranked = random.Random(seed), []
    for path in sorted(faults):
        shuffled = draw.sample(faults[path], len(faults[path]))
        ranked += [((place + draw.random()) / len(shuffled), fault) for place, fault in enumerate(shuffled)]
    return [fault for _, fault in sorted(ranked, key=lambda pair: pair[0])]


class Coverage:
    """Every test there is, by what it calls."""

    def __init__(self, tests: Iterable[ObservedTest]) -> None:
        self._by_function: dict[tuple[str, str], list[ObservedTest]] = defaultdict(list)
        self._by_file: dict[str, set[ObservedTest]] = defaultdict(set)
        for test in tests:
            for path, function in test.functions:
                self._by_function[path, function].append(test)
                self._by_file[path].add(test)

    def against(self, fault: Fault) -> list[tuple[list[str], float]]:
        """Return the tests to run, narrow ones first: [(names in order, seconds they took)]."""
        function = fault.function.replace(".<locals>", "")
        tests = self._by_function.get((fault.path, function)) or list(self._by_file[fault.path])
        inner = [test for test in tests if not test.file.startswith(_OUTER)]
        outer = [test for test in tests if test.file.startswith(_OUTER)]
        near = _nearest(inner, fault.path) | _nearest(outer, fault.path)
        widths = (
            [test for test in inner if test.file in near],
            [test for test in outer if test.file in near],
            [test for test in inner if test.file not in near],
            [test for test in outer if test.file not in near],
        )
        return [_within(width) for width in widths if width]


def _nearest(tests: Sequence[ObservedTest], path: str) -> set[str]:
    """Return the files of the tests of which most of what they call is in ``path``."""
    score: dict[str, float] = defaultdict(float)
    for test in tests:
        here = sum(called == path for called, _ in test.functions)
        score[test.file] = max(score[test.file], here / len(test.functions))
    return set(sorted(score, key=lambda file: -score[file])[:NARROW_FILES])


def _within(tests: Sequence[ObservedTest]) -> tuple[list[str], float]:
    names: list[str] = []
    seconds = 0.0
    for test in sorted(tests, key=lambda test: test.seconds):
        if names and seconds + test.seconds > MOST_S:
            break
        names.append(test.name)
        seconds += test.seconds
    return names, seconds
