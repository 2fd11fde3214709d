"""Programs and tests as public data sets have them, and programs that pretend to be right."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from node.values.groups.failure import Failure
from sampler.graders.code.code_options import CodeOptions
from sampler.graders.code.program_runs import ProgramResult, ProgramRuns
from sampler.graders.code.sandbox import Sandbox, find_sandbox
from sampler.tasks.processes.grader_requests import TaskError
from sampler.tasks.task import TaskSetup, load_task
from support.graded_texts import grading, setup_of, texts
from support.refusals import misconfigured, naming

pytestmark = pytest.mark.needs("bwrap", "libseccomp")

PATIENCE_S = 20
"""For a busy machine, where no program hangs."""

SQUARES = ["assert f(2) == 4", "assert f(3) == 9"]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return find_sandbox()


def verdicts(
    sandbox: Sandbox, given: Any, *programs: str, row: dict[str, Any] | None = None, **options: Any
) -> list[ProgramResult]:
    options = {"time_limit_s": PATIENCE_S, **options}
    return ProgramRuns(CodeOptions(**options), sandbox, at_once=2).verdicts(row or {}, given, programs)


def shares(found: Sequence[ProgramResult]) -> list[float]:
    return [verdict.passed / verdict.tests for verdict in found]


def test_the_last_fenced_block_or_else_the_whole_text_is_the_program(sandbox: Sandbox) -> None:
    right = "def f(x):\n    return x * x"
    found = verdicts(
        sandbox,
        SQUARES,
        right,
        f"First\n```python\ndef f(x): return 0\n```\nbetter:\n```py\n{right}\n```\nDone.",
        f"```\n{right}",
        "I think it is x * x.",
        "def f(x): return 4",
    )
    assert shares(found) == [1.0, 1.0, 1.0, 0.0, 0.5]
    assert [verdict.crashed for verdict in found] == [False, False, False, True, False]


def test_a_list_of_asserts_with_their_setup(sandbox: Sandbox) -> None:
    """MBPP: ``test_list`` and ``test_setup_code``."""
    tests = [
        "assert set(common((1, 2), (2, 3))) == set((2,))",
        "assert math.isclose(root(2.0), 1.41421, rel_tol=0.001)",
        "assert pairs({'a': [1], 'b': None}) == [('a', [1]), ('b', None)]",
        "assert re.fullmatch('[0-9]+', text(12)) and big() == 7 ** 5000 and raw(b'x') == b'xx'",
    ]
    right = """
import math as _m
def common(a, b): return tuple(set(a) & set(b))
def root(x): return _m.sqrt(x)
def pairs(table): return [(k, v) for k, v in table.items()]
def text(n): return str(n)
def big(): return 7 ** 5000
def raw(x): return x * 2
"""
    assert shares(verdicts(sandbox, tests, right, row={"s": "import re"}, setup="s")) == [1.0]
    assert shares(verdicts(sandbox, json.dumps(tests), right)) == [1.0]


def test_a_function_check_of_the_one_that_the_row_names(sandbox: Sandbox) -> None:
    """HumanEval: the completion goes on where the prompt ends; each assert of ``check`` is a test."""
    row = {
        "prompt": "from typing import List\n\ndef near(xs: List[float], to) -> float:\n    'Nearest.'\n",
        "entry_point": "near",
    }
    check = """
METADATA = {"author": "x"}

def check(candidate):
    assert candidate([1.0, 2.0], 1.2) == 1.0
    for to in (3, 5):
        assert abs(candidate([1.0, to], to) - to) < 1e-6
    assert candidate([math.inf], 0) == math.inf, "far"
"""
    options = {"prefix": "prompt", "entry_point": "entry_point"}
    whole = "```python\ndef near(xs, to):\n    return min(xs, key=lambda x: abs(x - to))\n```"
    found = verdicts(
        sandbox,
        check,
        "    return min(xs, key=lambda x: abs(x - to))\n",
        whole,
        "    return 1.0",
        row=row,
        **options,
    )
    assert shares(found) == [1.0, 1.0, 1 / 3]


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["2\n3\n", "5\n"], "outputs": ["4\n9\n", "25 \n\n"]},
        json.dumps({"inputs": [["2", "3"], "5"], "outputs": [["4", "9"], "25"]}),
        json.dumps(
            [{"input": "2\n3", "output": "4\n9", "testtype": "stdin"}, {"input": "5", "output": "25"}]
        ),
    ],
)
def test_inputs_and_outputs(sandbox: Sandbox, tests: Any) -> None:
    """APPS and LiveCodeBench."""
    found = verdicts(
        sandbox,
        tests,
        "import sys\nfor line in sys.stdin: print(int(line) ** 2)",
        "if __name__ == '__main__': print(25)",
        "print(4)\nprint(9)\nraise SystemExit(1)",
        tests="stdin",
    )
    assert shares(found) == [1.0, 0.5, 0.0]
    assert [verdict.crashed for verdict in found] == [False, False, True]
    assert verdicts(sandbox, tests, "print(4);print(9)", tests="stdin", most_tests=1) == [ProgramResult(1, 1)]


def test_to_print_nothing_is_no_test(sandbox: Sandbox) -> None:
    tests = {"inputs": ["1", "2"], "outputs": ["\n", "4"]}
    assert verdicts(sandbox, tests, "", "print(4)", tests="stdin") == [
        ProgramResult(0, 1),
        ProgramResult(1, 1),
    ]


def test_a_program_that_hangs_fails_the_rest_of_its_tests_and_nobody_elses(sandbox: Sandbox) -> None:
    hang = "def f(x):\n    while x == 3: pass\n    return x * x"
    sleep = "import time\ndef f(x): time.sleep(3600)"
    found = verdicts(
        sandbox, [*SQUARES, "assert f(4) == 16"], hang, "def f(x): return x * x", sleep, time_limit_s=1
    )
    assert found == [
        ProgramResult(1, 3, timed_out=True),
        ProgramResult(3, 3),
        ProgramResult(0, 3, timed_out=True),
    ]


def test_what_the_program_has_no_part_in_is_no_test(sandbox: Sandbox) -> None:
    """HumanEval: ``assert True, "This prints if this assert fails"``; and a reference in the tests."""
    tests = """
assert True, "always"
expected = [square * square for square in range(3)]
assert len(expected) == 3
assert [f(n) for n in range(3)] == expected
"""
    assert verdicts(sandbox, tests, "def f(n): return n * n", "f = None") == [
        ProgramResult(1, 1),
        ProgramResult(0, 1),
    ]
    shadowing = "code = queue = f(2)\nassert code == queue == 4"
    assert verdicts(sandbox, shadowing, "def f(n): return n * n", "f = None") == [
        ProgramResult(1, 1),
        ProgramResult(0, 1),
    ]


def test_a_statement_that_fails_spoils_what_it_should_have_changed_and_no_more(sandbox: Sandbox) -> None:
    tests = """
assert len(bag()) == 1
for x in (2, 3):
    got = f(x)
    assert got == x * x
for x in (4, 5):
    got = g(x)
    assert got == -x
faults = []
for x in (2, 3):
    faults += [x] if f(x) != x * x else []
assert faults == []
faults = [x for x in (2, 3) if g(x) != -x]
assert faults == []
"""
    program = "def bag(): return {object()}\ndef g(x): return -x\n"
    program += "def f(x):\n    if x == 3: raise ValueError\n    return x * x"
    assert verdicts(sandbox, tests, program) == [ProgramResult(2, 5)]


def test_what_the_prompt_defines_beside_the_question_is_not_the_programs_to_judge_by(
    sandbox: Sandbox,
) -> None:
    """HumanEval/32: a completion that defines ``poly`` again would pass with any root."""
    row = {
        "prompt": "import math\n\n"
        "def poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n"
        "def root(xs):\n    'Find x with poly(xs, x) = 0.'\n",
        "entry_point": "root",
    }
    check = "def check(candidate):\n    assert abs(poly([-4, 2], candidate([-4, 2]))) < 1e-4"
    found = verdicts(
        sandbox,
        check,
        "    return -xs[0] / xs[1]",
        "    return 7\n\ndef poly(xs, x):\n    return 0",
        row=row,
        prefix="prompt",
        entry_point="entry_point",
    )
    assert found == [ProgramResult(1, 1), ProgramResult(0, 1)]


def test_a_function_with_the_name_of_one_of_pythons_is_the_programs_if_the_row_says_so(
    sandbox: Sandbox,
) -> None:
    programs = ("def sum(xs): return 7", "def f(): pass")
    named: dict[str, Any] = {"row": {"name": "sum"}, "entry_point": "name"}
    assert shares(verdicts(sandbox, "assert sum([3, 4]) == 7", *programs, **named)) == [1.0, 0.0]
    with pytest.raises(ValueError, match="no assert in them that depends on the program"):
        verdicts(sandbox, "assert sum([3, 4]) == 7", *programs)


@pytest.mark.parametrize(
    ("tests", "options", "said"),
    [
        ("print(f(1))", {}, "no assert in them that depends on the program; if they are in a function check"),
        ("exec(f(1))\nassert f(2)", {}, "they use exec, by which an answer of the program could run as code"),
        ("from pickle import loads\nassert loads(f(1))", {}, "they use pickle, by which"),
        ("assert f(", {}, "cannot be used: SyntaxError"),
        ("import numpy\nassert f(1)", {}, "cannot do: import numpy"),
        ([1], {}, "not a text or a list of texts"),
        ("{}", {"tests": "stdin"}, "no pairs of input and output"),
        ("[]", {"tests": "stdin"}, "there are no tests"),
        ('[{"input": "1", "output": " "}]', {"tests": "stdin"}, "there are no tests"),
        ("assert f(1)", {"setup": "nothing"}, "column 'nothing' is missing: the row has e"),
        ("assert f(1)", {"setup": "n"}, "column 'n' is null, not a text"),
        ("assert f(1)", {"entry_point": "e"}, "the entry point 'f()' is no name"),
    ],
)
def test_tests_that_are_none_are_the_rows_fault(
    tests: Any, options: dict[str, Any], said: str, sandbox: Sandbox
) -> None:
    with pytest.raises((KeyError, ValueError), match=said.replace("(", r"\(").replace(")", r"\)")):
        verdicts(sandbox, tests, "def f(x): return x", row={"e": "f()", "n": None}, **options)


def setup(
    *, run_code: bool = True, wall_limit_s: float = 3600, group_size: int = 1, **code: Any
) -> TaskSetup:
    return setup_of(
        "jsonl",
        {"grader": "code", "code": code, "answer": "tests"},
        group_size=group_size,
        run_code=run_code,
        grader_wall_limit_s=wall_limit_s,
        grader_memory_limit_bytes=1 << 30,
    )


def test_the_reward_is_the_share_or_all_or_nothing() -> None:
    row = {"prompt": "Square.", "tests": SQUARES}
    half, right = texts("def f(x): return 4", "def f(x): return x * x")
    nothing = {"timed_out": False, "crashed": False}
    task = load_task(setup())
    assert task.prompt(0, row) == "Square."
    assert task.grade(0, row, half) == (0.5, {"passed": 0.5} | nothing)
    task = load_task(setup(reward="all"))
    assert task.grade(0, row, half) == (0.0, {"passed": 0.5} | nothing)
    assert task.grade(0, row, right) == (1.0, {"passed": 1.0} | nothing)


async def test_groups_are_graded_in_the_graders_process_and_a_bad_row_is_blamed() -> None:
    programs = texts("def f(x): return x * x", "1 / 0", "while True: pass")
    async with grading(setup(time_limit_s=1), wall_limit_s=60, memory_limit_bytes=2 << 30) as grader:
        grades = await grader.grade(0, programs, row=json.dumps({"tests": SQUARES}))
        assert grades.rewards == [1.0, 0.0, 0.0]
        assert grades.metrics == {"passed": [1, 0, 0], "timed_out": [0, 0, 1], "crashed": [0, 1, 0]}
        with naming(TaskError, "SyntaxError") as error:
            await grader.grade(0, programs, row='{"tests": "assert ("}')
        assert error.value.fault is Failure.GRADING_FAILED


def test_a_sampler_that_runs_no_programs_refuses_the_run() -> None:
    with misconfigured("sampler.run_code = false", key="coordinator.task_options.grader"):
        setup(run_code=False)


def test_the_limits_must_leave_programs_their_time_and_memory() -> None:
    with misconfigured("64", "7 s", key="sampler.grader_wall_limit_s"):
        setup(wall_limit_s=10, group_size=64)
    with misconfigured("grader_memory_limit_bytes", "1073741824", key="sampler.grader_memory_limit_bytes"):
        setup(memory_limit_bytes=2 << 30)
