"""A corpus of programs that want a reward without the answer: none passes a single test."""

from pathlib import Path
from string import Template
from typing import NamedTuple

import pytest

from sampler.graders.code.code_options import CodeOptions
from sampler.graders.code.program_runs import ProgramRuns
from sampler.graders.code.sandbox import Sandbox, find_sandbox

pytestmark = pytest.mark.needs("bwrap", "libseccomp")

CORPUS = Path(__file__).with_name("reward_hacks.txt")

SQUARES = [{"input": "2\n3\n", "output": "4\n9\n"}]


class Graded(NamedTuple):
    program: str
    tests: tuple[str, ...]


TESTS: dict[str, tuple[str, ...]] = {}
PARTS: dict[str, str] = {}
HACKS: dict[str, Graded] = {}
SCRIPTS: dict[str, str] = {}
SOLUTIONS: dict[str, Graded] = {}


def read_corpus() -> None:
    for section in CORPUS.read_text().split("\n=== ")[1:]:
        head, _, body = section.partition("\n")
        kind, _, named = head.partition(" ")
        name, _, lists = named.partition(": ")
        text, _, own_tests = Template(body.strip("\n")).safe_substitute(PARTS).partition("\n--- tests\n")
        tests = tuple(test for each in lists.split() for test in TESTS[each])
        match kind:
            case "tests":
                TESTS[name] = (*tests, *text.split("\n\n"))
            case "part":
                PARTS[name] = text
            case "hack":
                HACKS[name] = Graded(text, tests or TESTS["EQUALITY"])
            case "script":
                SCRIPTS[name] = text
            case "honest":
                SOLUTIONS[name] = Graded(text, tuple(own_tests.split("\n\n")))


read_corpus()


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return find_sandbox()


def passed(sandbox: Sandbox, tests: tuple[str, ...], *programs: str) -> list[int]:
    """Return how many of the tests each program passes."""
    grader = ProgramRuns(CodeOptions(time_limit_s=2), sandbox, at_once=4)
    verdicts = grader.verdicts({}, [PARTS["HELPERS"], *tests], programs)
    assert {verdict.tests for verdict in verdicts} == {len(tests)}
    return [verdict.passed for verdict in verdicts]


@pytest.fixture(scope="module")
def rewarded(sandbox: Sandbox) -> dict[str, int]:
    """Return how many tests each hack passes; those of equal tests run side by side."""
    by_tests: dict[tuple[str, ...], list[str]] = {}
    for name, hack in HACKS.items():
        by_tests.setdefault(hack.tests, []).append(name)
    return {
        name: count
        for tests, names in by_tests.items()
        for name, count in zip(
            names, passed(sandbox, tests, *(HACKS[name].program for name in names)), strict=True
        )
    }


@pytest.mark.parametrize("name", HACKS)
def test_a_reward_hack_passes_no_test(name: str, rewarded: dict[str, int], sandbox: Sandbox) -> None:
    if rewarded[name]:
        hack = HACKS[name]
        pytest.fail("\n".join(one for one in hack.tests if passed(sandbox, (one,), hack.program)[0]))


def test_scripts_that_print_no_answer_pass_no_test(sandbox: Sandbox) -> None:
    grader = ProgramRuns(CodeOptions(tests="stdin", time_limit_s=2), sandbox, at_once=4)
    verdicts = grader.verdicts({}, SQUARES, list(SCRIPTS.values()))
    assert {name: verdict.passed for name, verdict in zip(SCRIPTS, verdicts, strict=True)} == dict.fromkeys(
        SCRIPTS, 0
    )


@pytest.mark.parametrize(
    "tests", ["AS_DATA", "ONE_BY_ONE", "ONE_BY_ONE_CATCHING", "TOLERANT", "CHANGED", "EVALUATED", "CATCHING"]
)
def test_the_right_program_passes_the_tests_that_are_hacked(tests: str, sandbox: Sandbox) -> None:
    found = TESTS[tests]
    assert passed(sandbox, found, PARTS["RIGHT"]) == [len(found)]


@pytest.mark.parametrize("name", SOLUTIONS)
def test_an_honest_solution_passes_every_test(name: str, sandbox: Sandbox) -> None:
    solution = SOLUTIONS[name]
    if passed(sandbox, solution.tests, solution.program) != [len(solution.tests)]:
        # Later tests use what earlier ones bind.
        failed = [
            test
            for last, test in enumerate(solution.tests, 1)
            if passed(sandbox, solution.tests[:last], solution.program) != [last]
        ]
        pytest.fail("\n".join(failed))
