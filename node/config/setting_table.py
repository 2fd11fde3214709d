"""Every key of the sections that a process would have: its value, who set it, default, bounds and meaning.

It is made whether the settings are valid or not: keys that are required and not given are in it too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from node.config.setting_faults import table_model
from node.config.setting_sources import Setting

DEFAULT: Final = "default"
_BOUNDS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "maxItems": "at most {} items",
    "maxLength": "at most {} characters",
}
"""Bound of a JSON schema -> in words."""

LIVE: Final = "may change in a run"
"""Annotation of a field whose value may change while the process runs."""

NOWHERE: Final = "nowhere"
"""Source of a key that is required and not given."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A key."""

    name: str
    value: Any
    """As JSON has it; None too where it is required and not given."""
    brief: Any
    """The value, of a table without the keys that have their defaults."""
    source: str
    default: Any
    """None too where it follows from another key."""
    is_required: bool
    bounds: str
    """For people, such as "at least 0, below 1" or "one of a, b"; empty: those of its type alone."""
    meaning: str
    keys: "tuple[SettingRow, ...]" = ()
    """The keys of a table, where they are known, with their defaults."""

    @property
    def differs(self) -> bool:
        """Whether somebody gave it, and not its default."""
        return self.source not in (DEFAULT, NOWHERE) and self.value != self.default

    @property
    def is_missing(self) -> bool:
        """Whether the key is required and nobody gave it."""
        return self.source == NOWHERE


def rows_of(
    section: str, model: type[BaseModel], given: Mapping[str, Setting], valid: BaseModel | None
) -> Iterator[SettingRow]:
    """Yield the keys of a section.

    Args:
        given: its settings, parsed.
        valid: the section as validated; None: a setting is wrong, and those given are shown as they are.
    """
    dumped = None if valid is None else valid.model_dump(mode="json")
    brief = {} if valid is None else valid.model_dump(mode="json", exclude_defaults=True)
    schema = model.model_json_schema()["properties"]
    for key, field in model.model_fields.items():
        if field.exclude:  # nobody gives it
            continue
        default = _default(field)
        source = given[key].source if key in given else NOWHERE if field.is_required() else DEFAULT
        if dumped is not None:
            value = dumped[key]
        else:
            value = to_jsonable_python(given[key].value, fallback=str) if key in given else default
        table = table_model(model, key)
        yield SettingRow(
            name=f"{section}.{key}",
            value=value,
            brief=brief.get(key, value),
            source=source,
            default=default,
            is_required=field.is_required(),
            bounds=", ".join([*_bounds(schema[key]), *(one for one in field.metadata if one == LIVE)]),
            meaning=" ".join((field.description or "").split()),
            keys=() if table is None else tuple(rows_of(f"{section}.{key}", table, {}, None)),
        )


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the bounds of a value by its JSON schema, of each kind that it may be."""
    for kind in (schema, *schema.get("anyOf", ())):
        yield from (words.format(kind[word]) for word, words in _BOUNDS.items() if word in kind)
        if "enum" in kind:
            yield f"one of {', '.join(map(str, kind['enum']))}"


def _default(field: FieldInfo) -> Any:
    if field.is_required() or (field.default_factory and field.default_factory_takes_validated_data):
        return None
    return to_jsonable_python(field.get_default(call_default_factory=True), fallback=str)
