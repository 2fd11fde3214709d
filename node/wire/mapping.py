"""The rule by which values and messages become each other: fields and enum members keep their names.

Nested values, tuples, mappings, enums and optional fields follow from the types of a dataclass. A message
becomes a value only after it has met its check.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from heterorl.v1 import common_pb2
from node.errors import Reason, RefusedError
from node.values.groups.verdict import Verdict
from node.wire.checks import CHECKS

Value = TypeVar("Value")
Wire = TypeVar("Wire", bound=Message)
Member = TypeVar("Member", bound=StrEnum)

_Descriptor: TypeAlias = Any
"""Protobuf's of a message or enum, which has one class in Python and another in C."""
_Reader: TypeAlias = Callable[[Message, str], Any]


def to_wire(message_type: type[Wire], value: Any, **instead: Any) -> Wire:
    """Return a message with the fields of a dataclass ``value``; those in ``instead`` instead of its own."""
    return message_type(**_plain_fields(value, message_type.DESCRIPTOR, instead))


def from_wire(value_type: type[Value], message: Message, **instead: Any) -> Value:
    """Return a dataclass with the fields of a ``message``; those in ``instead`` instead of its own.

    Raises RefusedError: The message does not meet its check, or has an enum value we do not know.
    """
    if (check := CHECKS.get(type(message))) is not None:
        check(message)
    readers = _readers(value_type).items()  # type: ignore[arg-type]  # a class is hashable
    read = {name: reader(message, name) for name, reader in readers if name not in instead}
    return value_type(**read, **instead)


def optional_to_wire(message_type: type[Wire], value: object | None) -> Wire | None:
    """Return the message of a value; None, which leaves a field unset, where there is none."""
    return None if value is None else to_wire(message_type, value)


def optional_from_wire(value_type: type[Value], message: Message, field: str) -> Value | None:
    """Return the value in a field of ``message``; None where it is unset."""
    return from_wire(value_type, getattr(message, field)) if message.HasField(field) else None


def member_from_wire(kind: type[Member], message: Message, field: str) -> Member:
    """Return the enum member that a field of ``message`` names. Raises RefusedError: MALFORMED."""
    said = getattr(message, field)
    if isinstance(said, str):
        if said in set(kind):
            return kind(said)
        raise RefusedError(Reason.MALFORMED, f"{field} {said[:50]!r} is not one this version knows")
    enum: _Descriptor = message.DESCRIPTOR.fields_by_name[field].enum_type
    for member in kind:
        number = enum.values_by_name.get(_label(member, enum))
        if number is not None and number.number == said:
            return member
    raise RefusedError(
        Reason.MALFORMED, f"{_words(enum).replace('_', ' ')} {said} is not one this version knows"
    )


def known(kind: type[Member], messages: Iterable[Wire], field: str) -> tuple[Wire, ...]:
    """Return the messages of which ``field`` names a member that this version knows.

    For lists that are told and not acted upon: what a later version adds to them is passed over.
    """
    return tuple(one for one in messages if _names_known(kind, one, field))


def _names_known(kind: type[Member], message: Message, field: str) -> bool:
    try:
        member_from_wire(kind, message, field)
    except RefusedError:
        return False
    return True


def verdict_to_wire(verdict: Verdict) -> Any:
    return common_pb2.Verdict.Value(f"VERDICT_{verdict.name}")


def _plain_fields(value: Any, message: _Descriptor, instead: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass as protobuf's constructors take them: messages as dictionaries."""
    own = (field.name for field in fields(value) if field.name not in instead)
    return {name: _plain(getattr(value, name), message, name) for name in own} | dict(instead)


def _plain(value: Any, message: _Descriptor, name: str) -> Any:
    if isinstance(value, StrEnum):
        enum = message.fields_by_name[name].enum_type
        return value.value if enum is None else _label(value, enum)
    if is_dataclass(value):
        return _plain_fields(value, message.fields_by_name[name].message_type, {})
    if isinstance(value, tuple):
        return [_plain(item, message, name) for item in value]
    return value


def _words(enum: _Descriptor) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).lower()


def _label(member: StrEnum, enum: _Descriptor) -> str:
    return f"{_words(enum).upper()}_{member.name}"


@functools.cache
def _readers(value_type: Any) -> Mapping[str, _Reader]:
    hints = get_type_hints(value_type)
    return {field.name: _reader(hints[field.name]) for field in fields(value_type)}


def _reader(hint: Any) -> _Reader:
    parts: tuple[Any, ...] = get_args(hint)
    if NoneType in parts:
        (inner,) = (_reader(one) for one in parts if one is not NoneType)
        return lambda message, name: inner(message, name) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        if is_dataclass(parts[0]):
            item: type[Any] = parts[0]  # type: ignore[assignment]
            return lambda message, name: tuple(from_wire(item, one) for one in getattr(message, name))
        return lambda message, name: tuple(getattr(message, name))
    if get_origin(hint) is dict:
        return lambda message, name: dict(getattr(message, name))
    if is_dataclass(hint):
        kind: type[Any] = hint  # type: ignore[assignment]
        return lambda message, name: from_wire(kind, getattr(message, name))
    if issubclass(hint, StrEnum):
        return functools.partial(member_from_wire, hint)
    return getattr
