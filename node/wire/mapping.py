"""The two rules most of ``node.wire`` follows: fields and enum members keep their names on the wire."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from enum import StrEnum
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from node.errors import Reason, RefusedError

Value = TypeVar("Value")
Wire = TypeVar("Wire", bound=Message)
Member = TypeVar("Member", bound=StrEnum)


def to_wire(message_type: type[Wire], value: Any, **converted: Any) -> Wire:
    """Return a message with the fields of a dataclass ``value``; ``converted`` ones instead of its own."""
    same = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in converted}
    return message_type(**same, **converted)


def from_wire(value_type: type[Value], message: Message, **converted: Any) -> Value:
    """Return a dataclass with the fields of a ``message``; ``converted`` ones instead of its own."""
    names = (field.name for field in fields(value_type) if field.name not in converted)  # type: ignore[arg-type]
    return value_type(**{name: getattr(message, name) for name in names}, **converted)


class EnumMapping(Generic[Member]):
    """Members of an enum <-> numbers of a protobuf enum."""

    def __init__(
        self, number: Callable[[str], int], prefix: str, members: Iterable[Member], *, of: str
    ) -> None:
        """Map each of ``members`` to ``number`` of its name after ``prefix``.

        Raises ValueError: one is lacking.
        """
        self._number_of = {member: number(f"{prefix}_{member.name}") for member in members}
        self._member_of = {number: member for member, number in self._number_of.items()}
        self._of = of

    def to_wire(self, member: Member) -> Any:
        return self._number_of[member]

    def from_wire(self, number: int) -> Member:
        if number not in self._member_of:
            raise RefusedError(Reason.MALFORMED, f"{self._of} {number} is not one this version knows")
        return self._member_of[number]
