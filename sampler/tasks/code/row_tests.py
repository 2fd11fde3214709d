"""The program in a completion, and inputs with outputs in a row, as public data sets have them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from node.task_options import column_of

_BLOCK: Final = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A program's input, and the output it should print."""

    input: str
    output: str

    def accepts(self, printed: str) -> bool:
        """Compare line by line; blanks at the ends of lines and empty lines at the end do not count."""
        return _lines(printed) == _lines(self.output)


def program_of(text: str, prefix: str) -> str:
    """Return the last fenced block, or all of a text that has none; ``prefix`` is what it continues."""
    if blocks := _BLOCK.findall(text):
        return f"{prefix}\n{blocks[-1]}" if prefix else str(blocks[-1])
    return prefix + text


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


def column(row: Mapping[str, Any], name: str | None) -> str:
    """Return the text of a column, none without a name; KeyError or ValueError if the row has none."""
    if name is None:
        return ""
    if not isinstance(text := column_of(row, name), str):
        raise ValueError(f"column {name!r} is {type(text).__name__}, not a text")
    return text


def _text(value: Any) -> str:
    """Return a text; some data sets have lists of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
