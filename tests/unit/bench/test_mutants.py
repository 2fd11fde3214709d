"""Faults are planted where tests can catch them, drawn evenly, and run against the tests that call them."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from bench.mutants.faults import Fault, faults
from bench.mutants.plan import Coverage, ObservedTest, drawn, known
from bench.mutants.targets import modules

ROOT = Path(__file__).parents[3]
SOURCE = '''
"""Says nothing in 3 words."""
LIMIT = 10


class Box:
    size: int = 0

    def room(self, wanted: int) -> bool:
        logger.info("asked", extra={"wanted": 1})
        return self.size + wanted <= LIMIT and not self.closed
'''


def changes(source: str) -> set[tuple[str, str]]:
    return {(fault.before, fault.after) for fault in faults("box.py", source)}


def test_every_fault_changes_one_place_of_a_source_that_still_parses() -> None:
    for fault in faults("box.py", SOURCE):
        ast.parse(fault.source)
        assert fault.diff(SOURCE).count("\n") == 1


def test_boundaries_operators_results_and_numbers_change_and_settings_and_logs_do_not() -> None:
    assert changes(SOURCE) == {
        ("0", "1"),
        ("return self.size + wanted <= LIMIT and not self.closed", "return None"),
        (
            "self.size + wanted <= LIMIT and not self.closed",
            "(self.size + wanted <= LIMIT or not self.closed)",
        ),
        ("self.size + wanted <= LIMIT", "(self.size + wanted < LIMIT)"),
        ("self.size + wanted <= LIMIT", "(self.size + wanted > LIMIT)"),
        ("self.size + wanted", "(self.size - wanted)"),
        ("not self.closed", "(self.closed)"),
    }


@pytest.mark.parametrize(
    "statement", ["assert x > 1", "z = zip(x, strict=True)", "z = np.maximum(x, y)", "logger.info(1 + 1)"]
)
def test_what_changes_nothing_or_checks_our_own_work_is_left_alone(statement: str) -> None:
    assert changes(f"def f():\n    {statement}\n") == set()


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("def f():\n    send(a, b)\n", "send(a, b)", "send(b, a)"),
        ("def f():\n    send(a, b)\n", "send(a, b)", "pass"),
        ("def f():\n    raise ValueError(1)\n", "raise ValueError(1)", "pass"),
        ("def f():\n    x.y = 7\n", "x.y = 7", "pass"),
        ("def f():\n    if ready:\n        go()\n", "ready", "not ready"),
        ("def f():\n    return a if b else c\n", "a if b else c", "(c if b else a)"),
        ("def f():\n    return min(a)\n", "min(a)", "max(a)"),
    ],
)
def test_statements_arguments_and_branches_change(source: str, before: str, after: str) -> None:
    assert (before, after) in changes(source)


def test_a_fault_keeps_its_name_where_lines_move() -> None:
    names = [fault.name for fault in faults("box.py", SOURCE)]
    assert [fault.name for fault in faults("box.py", "\n\n" + SOURCE)] == names


def made(path: str, count: int) -> list[Fault]:
    return [Fault(path, "f", line, "a", "b", f"{path}{line}") for line in range(count)]


def test_any_beginning_of_what_is_drawn_has_of_each_file_in_proportion() -> None:
    order = drawn({"large": made("large", 300), "small": made("small", 100)}, seed=3)
    assert len(order) == 400
    counts = Counter(fault.path for fault in order[:40])
    assert abs(counts["small"] - 10) <= 2
    assert order == drawn({"small": made("small", 100), "large": made("large", 300)}, seed=3)


def test_narrow_tests_come_first_and_integration_last() -> None:
    here = ("box.py", "f")
    near = ObservedTest("tests/unit/test_box.py::a", 0.1, frozenset({here}))
    slow = ObservedTest("tests/unit/test_box.py::b", 5.0, frozenset({here}))
    wide = ObservedTest("tests/integration/test_all.py::a", 0.2, frozenset({here, ("other.py", "g")}))
    other = ObservedTest("tests/unit/test_other.py::a", 0.1, frozenset({("other.py", "g")}))
    widths = Coverage([wide, slow, other, near]).against(made("box.py", 1)[0])
    assert [names for names, _ in widths] == [[near.name, slow.name], [wide.name]]


def test_outside_of_functions_every_test_of_the_file_is_run() -> None:
    test = ObservedTest("tests/unit/test_box.py::a", 0.1, frozenset({("box.py", "f")}))
    fault = Fault("box.py", "", 1, "a", "b", "")
    assert Coverage([test]).against(fault) == [([test.name], 0.1)]


def test_every_known_survivor_is_a_fault_there_is() -> None:
    text = (ROOT / "bench/mutants/known.toml").read_text()
    there = {fault.name for path in modules(ROOT) for fault in faults(path, (ROOT / path).read_text())}
    assert [name for name in known(text) if name not in there] == []
