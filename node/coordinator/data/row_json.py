"""Rows as JSON: strictly read, and written from what pyarrow and ``datasets`` return."""

import base64
import datetime
import json
import math
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NoReturn

_DATES = (datetime.date, datetime.time, datetime.timedelta, uuid.UUID)


def read_json(text: str) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is not JSON, a number is beyond what a float holds, or an object has a key twice, of
            which readers take the one or the other.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(_in_short(str(error))) from error


def write_json(row: Mapping[str, Any]) -> bytes:
    """Return a row as JSON.

    NaN and NaT, which pandas writes for what is missing, are null. Decimals and dates are texts; bytes are
    the text that they encode, or {"base64": ...}.

    Raises:
        ValueError: a column has something that JSON cannot say.
    """
    plain = {}
    for name, value in row.items():
        try:
            plain[str(name)] = _plain(value)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"column {name!r}: {error}; drop this column, or write it as a text") from error
    text = json.dumps(plain, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(plain).encode()


def raw_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and where it ends; raises as ``read_json``."""
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if math.isinf(value):
                raise ValueError("it is infinite, and JSON has no number for that")
            return None if math.isnan(value) else value
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case bytes() | bytearray():
            return _text_of(bytes(value))
        case Decimal():
            return None if value.is_nan() else _decimal_text(value)
        case _ if isinstance(value, _DATES):
            # pandas' NaT is a date that does not equal itself.
            return str(value) if value == value else None
        case _ if hasattr(value, "tolist"):  # numpy's arrays and scalars
            return _plain(value.tolist())
    raise ValueError(f"it is a {type(value).__name__}, which JSON cannot say")


def _text_of(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _decimal_text(value: Decimal) -> str:
    """Return 42 for 42.00: the digits that a column's type adds are not the data's."""
    return format(value.normalize(), "f") if value.is_finite() else str(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is beyond the largest number that a float holds; write it as a text")
    return number


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number; write null")


def _in_short(said: str) -> str:
    if "integer string conversion" in said:
        return "a number has more than 4300 digits; write it as a text"
    return said


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_refuse_constant)
