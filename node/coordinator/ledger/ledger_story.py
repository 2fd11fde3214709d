"""Compares a ledger with the learner's log of steps: both tell which groups each version was trained on.

The log may be ahead: a learner tells of a step once it is durable, and repeats what the coordinator missed.
Steps that an accepted loss covers are the log's alone. All else must agree, group by group.
"""

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from node.coordinator.ledger.ledger_check import lost_ranges, reading
from node.coordinator.work.slots import parse_group_id
from node.step_log_parts import log_lines

_SHOWN: Final = 5
"""Contradictions reported; the rest are alike."""

_TOLD: Final = "SELECT group_ids, staleness_versions FROM steps WHERE version = ?"
_WINNER: Final = (
    "SELECT json_extract(value, '$[1]') FROM slots, json_each(attempts) "
    "WHERE number = ? AND json_extract(value, '$[0]') = ?"
)


@dataclass(frozen=True, slots=True)
class Story:
    """The result of a comparison."""

    log: str
    steps: int
    """In the log."""
    first_version: int
    """Version of its first line: above 1 where older parts of the log were moved away; 0: it is empty."""
    untold_steps: int
    """Newest ones, of which the ledger has not heard."""
    contradictions: tuple[str, ...]


def compare(ledger: Path, log: Path) -> Story:
    """Read both from end to end, a line at a time.

    Raises:
        StartupError: the log is not there, or a line of it is not a step's.
        sqlite3.Error: the ledger cannot be read.
        FileNotFoundError: there is no ledger.
    """
    with reading(ledger) as connection:
        connection.execute("BEGIN")  # a snapshot: a coordinator may go on writing
        comparison = _Comparison(connection)
        contradictions = tuple(islice(comparison.contradictions(log_lines(log)), _SHOWN))
    return Story(str(log), comparison.steps, comparison.first, comparison.untold, contradictions)


class _Comparison:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.steps = self.first = self.untold = 0
        self._connection = connection
        (self._last,) = connection.execute("SELECT coalesce(max(version), 0) FROM steps").fetchone()
        self._lost = lost_ranges(connection)

    def contradictions(self, lines: Iterator[dict[str, Any]]) -> Iterator[str]:
        for line in lines:
            self.steps += 1
            version = line["version"]
            self.first = self.first or version
            if version != self.first + self.steps - 1:
                yield f"the log's line {self.steps} is of version {version}"
                return
            told = self._connection.execute(_TOLD, [version]).fetchone()
            if told is not None:
                yield from self._differences(version, line["groups"], *map(json.loads, told))
            elif version > self._last:
                self.untold += 1
            elif not any(version in lost for lost in self._lost):
                yield f"the log has step {version}, the ledger goes on to {self._last} without it"
        ends_with = self.first + self.steps - 1 if self.steps else 0
        if self._last > ends_with:
            yield f"the ledger has steps up to {self._last}, the log ends with {ends_with}"

    def _differences(
        self, version: int, logged: list[dict[str, Any]], ids: list[str], staleness: list[int]
    ) -> Iterator[str]:
        if (names := [group["group_id"] for group in logged]) != ids:
            other = sorted(set(names) ^ set(ids)) or names
            yield (
                f"step {version} has {len(names)} groups in the log and {len(ids)} in the ledger, "
                f"{other[0]} is not in both or not in its place"
            )
            return
        for group, versions in zip(logged, staleness, strict=True):
            name = group["group_id"]
            winner = self._connection.execute(_WINNER, parse_group_id(name) or (-1, 0)).fetchone()
            ours = (winner and winner[0], versions)
            theirs = (group["sampler_id"], group["staleness_versions"])
            if ours != theirs:
                yield (
                    f"group {name} of step {version}: the log says {theirs[0]}'s, {theirs[1]} versions old, "
                    f"the ledger {ours[0]}'s, {ours[1]} versions old"
                )
