"""The rows of a data set: JSON objects in JSONL files, read from disk when they are leased.

    files --every line checked, its place and checksum kept--> Rows --row(index)--> bytes
              '-- what cannot be a prompt --> tally

Some rows are for evaluation and are never trained on: the last ones of the file, or the first ones of a
second file. Their numbers follow those of the others. Rows added during a run, at the end of the file, get
the numbers after them, so that every row keeps its own:

    numbers   0 ... training ... | held_out_at ... held out ... | added ...

The index takes 16 bytes of memory a row. Files stay open, so that removing or replacing one changes nothing;
a row that was overwritten is noticed when it is read.
"""

import json
import math
import os
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import blake3
import xxhash

from node.coordinator.data.row_json import read_json
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.errors import ConfigError, Reason, RefusedError
from node.questions.data_row import RowError, RowTally, column_of
from node.tasks.task_options import TaskOptions
from node.values.limits import ROW_BYTES

DIGEST_BYTES: Final = 16

TOLD_EVERY_ROWS: Final = 50_000

CHECK_S: Final = 300.0
"""Longest time of a dry run to check rows for the task, some millions of them (10 to 160 us each)."""

START_CHECK_S: Final = 20.0
"""Longest time of a start. Rows after that are indexed alone: samplers that lease them find what cannot be
used."""


@dataclass(frozen=True, slots=True)
class RowCheck:
    """A check of every row for the run's task."""

    options: TaskOptions | None
    """None: a custom task, whose rows are its own business."""
    told: Callable[[int], None] = lambda rows: None
    """Called now and then with how many rows were read."""
    limit_s: float = CHECK_S
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A file whose first rows are the evaluation's."""

    file: BinaryIO
    name: str


class Rows:
    """Indexed files. ``row`` may be called from any thread."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        name: str,
        evaluation_rows: int = 0,
        held_out: HeldOut | None = None,
        known: DataSeen = NO_DATA,
        check: RowCheck | None = None,
    ) -> None:
        """Index and check the files, which stay open from then on; blocking, about 2 s per 100 MB.

        Raises:
            ConfigError: a line is no JSON object or is too long, or there are too few rows.
        """
        digest = blake3.blake3()
        self.tally = RowTally()
        """Rows that cannot be used, where they were checked."""
        self._unusable: set[int] = set()
        self._check = check
        self._checked_until_s = math.inf if check is None else check.clock() + check.limit_s
        training = _RowFile(file, name, self._note)
        self._parts = [training]
        training.index(digest, at_most=known.held_out_at if known.rows else None)
        if held_out is not None:
            self._parts.append(_RowFile(held_out.file, held_out.name, self._note))
            self._parts[1].index(digest, at_most=evaluation_rows)
        training.index(digest, at_most=max(0, known.rows - len(self)))
        self.known_part: bytes = digest.digest(length=DIGEST_BYTES)
        """Digest of as many rows as were known."""
        training.index(digest, at_most=None)
        self.digest: bytes = digest.digest(length=DIGEST_BYTES)
        """Digest of all rows in the order of their numbers; blank lines and line ends do not count."""
        self.longest_bytes = max(part.longest_bytes for part in self._parts)
        last = self._parts[-1]
        if held_out is not None and len(last) < evaluation_rows:
            raise _too_few(evaluation_rows, f"is more than {last.name} has: {len(last)}")
        if not len(training):
            raise _bad_row(f"{name} has no rows", fix="Name a file with rows.")
        if len(self) <= evaluation_rows:
            raise _too_few(evaluation_rows, f"leaves no row to train on: {name} has {len(self._parts[0])}")
        held_out_at = known.held_out_at if known.rows else len(self) - evaluation_rows
        self.evaluation = range(held_out_at, held_out_at + evaluation_rows)
        """Numbers of the rows that are never trained on."""
        self.prompts = len(self) - evaluation_rows
        """How many rows there are to train on."""

    def is_usable(self, index: int) -> bool:
        """Whether a row can be a prompt, as far as it was checked."""
        return index not in self._unusable

    def _note(self, row: Mapping[str, Any], name: str, place: int) -> None:
        """Check the row that gets the next number."""
        if self._check is None:
            return
        index = len(self)
        if index and index % TOLD_EVERY_ROWS == 0:
            self._check.told(index)
            if self._check.clock() > self._checked_until_s:
                self._check = None
                return
        self.tally.checked += 1
        try:
            if self._check.options is not None:
                self._check.options.check_row(row)
        except RowError as error:
            self.tally.add(error, f"row {place} of {name}")
            self._unusable.add(index)

    @property
    def seen(self) -> DataSeen:
        return DataSeen(self.digest, len(self), len(self.evaluation), self.evaluation.start)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def row(self, index: int) -> bytes:
        """Read one row, a JSON object; blocking.

        Raises:
            RefusedError: DISK; it cannot be read, or is not what it was when it was indexed.
        """
        if len(self._parts) == 1 or index < self.evaluation.start:
            return self._parts[0].row(index)
        if index in self.evaluation:
            return self._parts[1].row(index - self.evaluation.start)
        return self._parts[0].row(index - len(self.evaluation))

    def check_columns(self, columns: Mapping[str, str], *, every_row: bool = False) -> None:
        """Check that rows have the columns that the task's options name.

        Args:
            columns: By option.
            every_row: Or else the first of each file: a run sets a bad row aside.
        Raises:
            ConfigError: one lacks a column.
        """
        for part in self._parts:
            for option, column in columns.items():
                lacking = [n for n in range(len(part) if every_row else 1) if not _has(part.row(n), column)]
                if lacking:
                    found = json.loads(part.row(lacking[0]))
                    which = (
                        "its first row"
                        if not lacking[0]
                        else f"{len(lacking)} rows, of which row {lacking[0]}"
                    )
                    raise ConfigError(
                        key=f"coordinator.task_options.{option}",
                        value=column,
                        source="the configuration or the option's default",
                        rule=f"{part.name} has no such column: {which} has {', '.join(found) or 'none'}"
                        f"{_rows_inside(found) if len(part) == 1 else ''}",
                        fix="Name one of them, or what is inside one, such as reward_model.ground_truth."
                        if not lacking[0]
                        else "Correct or remove these rows.",
                    )

    def close(self) -> None:
        for part in self._parts:
            part.file.close()


class _RowFile:
    def __init__(
        self, file: BinaryIO, name: str, note: Callable[[Mapping[str, Any], str, int], None]
    ) -> None:
        self.file = file
        self.name = name
        self._note = note
        self._starts = array("q", [0])
        self._checksums = array("Q")
        self._lines = 0
        self.longest_bytes = 0

    def index(self, digest: blake3.blake3, *, at_most: int | None) -> None:
        """Index so many rows more, or the rest, and add them to the digest."""
        start = self._starts.pop()
        until = None if at_most is None else len(self) + at_most
        while (until is None or len(self) < until) and (line := self.file.readline(ROW_BYTES + 2)):
            self._lines += 1
            if row := line.strip():
                content = _content(row, where=f"line {self._lines} of {self.name}")
                self._note(content, self.name, len(self))
                self._starts.append(start)
                self._checksums.append(xxhash.xxh3_64_intdigest(row))
                self.longest_bytes = max(self.longest_bytes, len(row))
                digest.update(len(row).to_bytes(8) + row)
            start += len(line)
        self._starts.append(start)

    def __len__(self) -> int:
        return len(self._checksums)

    def row(self, index: int) -> bytes:
        start, end = self._starts[index], self._starts[index + 1]
        try:
            row = os.pread(self.file.fileno(), end - start, start).strip()
        except OSError as error:
            raise self._unreadable(index, str(error)) from error
        if xxhash.xxh3_64_intdigest(row) != self._checksums[index]:
            raise self._unreadable(index, "it was changed since the coordinator started")
        return row

    def _unreadable(self, index: int, why: str) -> RefusedError:
        return RefusedError(
            Reason.DISK,
            f"row {index} of {self.name} cannot be read: {why}",
            fix="put the file back as it was and restart the coordinator",
        )


def _has(row: bytes, column: str) -> bool:
    try:
        column_of(json.loads(row), column)
    except KeyError:
        return False
    return True


def _rows_inside(found: Mapping[str, Any]) -> str:
    """Return a hint where the only row of a file holds all rows."""
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f"; if the rows are inside {name!r}, write them out, as by jq -c '.{name}[]'"
    return ""


def _content(row: bytes, *, where: str) -> Mapping[str, Any]:
    if len(row) > ROW_BYTES:
        raise _bad_row(
            f"{where} is longer than {ROW_BYTES} bytes{_largest_column(row)}",
            fix="Leave out what no sampler needs. Of a file that is one object around its rows, write the "
            "rows one a line, as by jq -c '.data[]'.",
        )
    try:
        content: Any = read_json(row.decode())
    except ValueError as error:
        hint = ", and a comma stands behind it" if row.endswith(b",") else ""
        if isinstance(error, UnicodeDecodeError):
            hint = "; convert the file to UTF-8, as by iconv -f LATIN1 -t UTF-8"
        raise _bad_row(f"{where} is not JSON: {error}{hint}") from error
    if not isinstance(content, dict):
        raise _bad_row(f"{where} is {type(content).__name__}, not a JSON object")
    return content


def _largest_column(row: bytes) -> str:
    """Return which column makes a row long, where all of it was read."""
    try:
        content = read_json(row.decode())
        sizes = {name: len(json.dumps(value)) for name, value in content.items()}
    except (ValueError, AttributeError):
        return ""
    name = max(sizes, key=sizes.__getitem__)
    return f", {sizes[name]} of them in column {name!r}"


def _too_few(evaluation_rows: int, rule: str) -> ConfigError:
    return ConfigError(
        key="coordinator.data.evaluation_rows",
        value=evaluation_rows,
        source="the configuration",
        rule=rule,
        fix="Lower it, or add rows.",
    )


def _bad_row(
    rule: str, *, fix: str = "Every line is one JSON object: correct or remove this one."
) -> ConfigError:
    return ConfigError(
        key="coordinator.data.file",
        value="...",
        source="the configuration",
        rule=rule,
        fix=fix,
    )
