"""The tests of a row for the grader ``code``, in the layouts of public data sets."""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from node.questions.data_row import RowError, found_in
from node.questions.json_values import kind_of_value
from sampler.graders.code.code_options import CodeOptions


@dataclass(frozen=True, slots=True)
class Exchange:
    """A program's input, and the output it should print."""

    input: str
    output: str

    def accepts(self, printed: str) -> bool:
        """Compare line by line; blanks at the ends of lines and empty lines at the end do not count."""
        return _lines(printed) == _lines(self.output)


def check_tests(row: Mapping[str, Any], column: str, options: CodeOptions) -> None:
    """Check that a row has tests, as far as their text shows; a sandbox finds the rest.

    Raises:
        RowError: it has none, or a column that the options name is not a text.
    """
    for name in (options.prefix, options.entry_point, options.setup):
        text_of(row, name)
    tests = found_in(row, column)
    if tests is None or tests in ("", [], {}):
        raise RowError(column, "has no tests")
    try:
        if options.tests == "stdin":
            exchanges_of(tests, options.most_tests)
            return
        nodes = [node for source in asserts_of(tests) for node in ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = "are not Python" if isinstance(error, SyntaxError) else f"cannot be used ({error})"
        raise RowError(column, f"has tests that {what:.200}", value=tests) from error
    if not any(isinstance(node, ast.Assert) for node in nodes):
        raise RowError(column, "has tests without an assert", value=tests)


def asserts_of(tests: Any) -> list[str]:
    """Return the sources of a test or a list (MBPP's test_list), also as JSON; ValueError for others."""
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        tests = json.loads(tests)
    sources = [tests] if isinstance(tests, str) else tests
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise ValueError(f"the tests are {type(tests).__name__}, not a text or a list of texts")
    return sources


def exchanges_of(tests: Any, most: int) -> list[Exchange]:
    """Return the first of the inputs with their outputs.

    Both ``{"inputs": [...], "outputs": [...]}`` (APPS) and ``[{"input": ..., "output": ...}]``
    (LiveCodeBench) are known, also as JSON.

    Raises:
        ValueError: there are none with an output.
    """
    if isinstance(tests, str):
        tests = json.loads(tests)
    try:
        if isinstance(tests, Mapping):
            pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        else:
            pairs = [(test["input"], test["output"]) for test in tests]
    except (LookupError, TypeError) as error:
        raise ValueError(f"the tests are no pairs of input and output: {error!r}") from error
    exchanges = [Exchange(_text(given), _text(expected)) for given, expected in pairs[:most]]
    # A program that ends at once prints nothing.
    if not (found := [exchange for exchange in exchanges if exchange.output.strip()]):
        raise ValueError("there are no tests")
    return found


def text_of(row: Mapping[str, Any], name: str | None) -> str:
    """Return the text of a column, none without a name; RowError if the row has none."""
    if name is None:
        return ""
    if not isinstance(text := found_in(row, name), str):
        raise RowError(name, f"is {kind_of_value(text)}, not a text", value=text)
    return text


def _text(value: Any) -> str:
    """Return a text; some data sets have lists of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
