"""A fact: a small durable truth of a run, which the coordinator's ledger keeps by its kind and key.

    feature --Transaction(facts=(Standing(...),))--> table facts: kind "standing", key "s1", value as JSON
    start   --each row decoded--> Standing(...) --> the feature's reducer

A feature owns its facts: a frozen dataclass with a ``kind``, whose fields are the value. Fields that have
their default are left out of the value, so that software which does not know a new field yet reads all facts
that do not use it. Hence a new field has a default, and a default never changes: it is part of what was
written. A change that this does not cover is another kind.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VALUE_CHARACTERS: Final = 1 << 20
"""Longest value that is read. The longest that is written, a learner's, has some 20 000."""


class MalformedFactError(ValueError):
    """A value is not one of its kind; the text names kind and key."""


class Fact:
    """A truth about one thing; the newest of a kind and key replaces the one before."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "strict": True,
        "extra": "forbid",
        "ser_json_bytes": "hex",
        "val_json_bytes": "hex",
    }

    kind: ClassVar[str]
    """As in the ledger; never used again for anything else."""
    heading: ClassVar[str] = ""
    """Heading of its line in the state of the run, at most nine characters. Only a kind of which a run has
    one fact may have a line."""

    def told(self, now: float) -> str:
        """Return its line in the state of the run, for people; empty: nothing to tell.

        Args:
            now: Unix seconds on the coordinator's clock.
        """
        return ""

    @property
    def key(self) -> str:
        """Name of the thing it is about, among the facts of its kind; empty: a run has one such fact."""
        return ""

    def encoded(self) -> str:
        """Return the value as compact JSON."""
        # Not ``dump_json``, which takes 2 us more before it calls this.
        return _codec(type(self)).serializer.to_json(self, exclude_defaults=True).decode()

    def fields(self) -> dict[str, Any]:
        """Return every field by name, those at their default too, as JSON has them."""
        named: dict[str, Any] = _codec(type(self)).dump_python(self, mode="json")
        return named

    @classmethod
    def decoded(cls, key: str, value: str) -> Self:
        """Return the fact that a value says.

        Raises:
            MalformedFactError: it says none, or one of another key.
        """
        from pydantic import ValidationError  # heavy: a command that reads no fact does without

        if len(value) > VALUE_CHARACTERS:
            raise MalformedFactError(f"fact {cls.kind!r} of {key!r} has {len(value)} characters")
        try:
            fact: Self = _codec(cls).validate_json(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise MalformedFactError(
                f"fact {cls.kind!r} of {key!r} is malformed: {where}{': ' * bool(where)}{first['msg']}"
            ) from error
        if fact.key != key:
            raise MalformedFactError(f"fact {cls.kind!r} of {key!r} is about {fact.key!r}")
        return fact


@dataclass(frozen=True, slots=True)
class Gone:
    """The end of a fact, in the place of one that replaces it."""

    kind: str
    key: str


OneFact = TypeVar("OneFact", bound=Fact)


_CODECS: "Final[dict[type[Fact], TypeAdapter[Any]]]" = {}


def _codec(kind: type[Fact]) -> "TypeAdapter[Any]":
    if (codec := _CODECS.get(kind)) is None:
        from pydantic import TypeAdapter

        codec = _CODECS[kind] = TypeAdapter(kind)
    return codec
