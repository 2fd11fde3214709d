"""JSON values of rows: what kind of value one is, in words, and a value without what is null in it."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn


def kind_of_value(value: object) -> str:
    """Return what a JSON value is, for people: ``null``, ``a text``, ``an object``."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case str():
            return "a text"
        case int() | float():
            return "a number"
        case Mapping():
            return "an object"
        case _:
            return "a list"


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null, at every depth.

    Arrow gives all rows of a column the same keys: what one message has, every other one has as null. Nulls
    in lists are the data's own, such as in the ``enum`` of a JSON schema.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(each) for each in value]
    return value


def value_in_text(text: str) -> Any:
    """Return the JSON value that a text holds; ValueError if it holds none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def has_whole_characters(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can write and no tokenizer takes."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
