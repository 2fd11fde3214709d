"""A corpus of programs that want a reward without the answer: none passes a single test."""

import pytest

from sampler.graders.code.code_options import CodeOptions
from sampler.graders.code.program_runs import ProgramRuns
from sampler.graders.code.sandbox import Sandbox, find_sandbox
from support import reward_hacks as corpus
from support.reward_hacks import HACKS, HELPERS, HONEST, SCRIPTS, SOLUTIONS

pytestmark = pytest.mark.needs("bwrap", "libseccomp")

SQUARES = [{"input": "2\n3\n", "output": "4\n9\n"}]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return find_sandbox()


def passed(sandbox: Sandbox, tests: tuple[str, ...], *programs: str) -> list[int]:
    """Return how many of the tests each program passes."""
    grader = ProgramRuns(CodeOptions(time_limit_s=4), sandbox, at_once=4)
    verdicts = grader.verdicts({}, [HELPERS, *tests], programs)
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
    grader = ProgramRuns(CodeOptions(tests="stdin", time_limit_s=4), sandbox, at_once=4)
    verdicts = grader.verdicts({}, SQUARES, list(SCRIPTS.values()))
    assert {name: verdict.passed for name, verdict in zip(SCRIPTS, verdicts, strict=True)} == dict.fromkeys(
        SCRIPTS, 0
    )


@pytest.mark.parametrize(
    "tests", ["AS_DATA", "ONE_BY_ONE", "ONE_BY_ONE_CATCHING", "TOLERANT", "CHANGED", "EVALUATED", "CATCHING"]
)
def test_the_right_program_passes_the_tests_that_are_hacked(tests: str, sandbox: Sandbox) -> None:
    found = getattr(corpus, tests)
    assert passed(sandbox, found, HONEST) == [len(found)]


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
