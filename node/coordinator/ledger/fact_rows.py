"""Facts as rows of a ledger: kind, key, and the value as JSON.

A kind that this software does not know was written by a newer release, before somebody went back to this one.
Its rows stay as they are. A row of a known kind that cannot be read is damage, and ends the start by name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from node.coordinator.work.balance import FACTS
from node.values.fact import Fact


@dataclass(frozen=True, slots=True)
class Owner(Fact):
    """The run that a ledger belongs to; the ledger's own fact."""

    kind: ClassVar[str] = "run"

    run_id: str


Row = tuple[str, str, str]

_KNOWN: Final[tuple[type[Fact], ...]] = (Owner, *FACTS)

KINDS: Final[Mapping[str, type[Fact]]] = {kind.kind: kind for kind in _KNOWN}


def row_of(fact: Fact) -> Row:
    return (fact.kind, fact.key, fact.encoded())


def fact_of(row: Row) -> Fact | None:
    """Return what a row says; None: its kind is not known. Raises MalformedFactError."""
    kind, key, value = row
    of = KINDS.get(kind)
    return None if of is None else of.decoded(key, value)


def facts_of(rows: Iterable[Row]) -> tuple[tuple[Fact, ...], Mapping[str, int]]:
    """Return the facts for the accounts, and how many there are of each kind that is not known.

    Raises:
        MalformedFactError: a row of a known kind says no such fact.
    """
    facts, unknown = [], Counter[str]()
    for row in rows:
        fact = fact_of(row)
        if fact is None:
            unknown[row[0]] += 1
        elif not isinstance(fact, Owner):
            facts.append(fact)
    return tuple(facts), dict(unknown)
