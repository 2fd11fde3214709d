"""The rows of a data set: JSON objects in JSONL files, read from disk when they are leased.

    files --every line checked, its place and checksum kept--> Rows --row(index)--> bytes

Some rows are for evaluation and are never trained on: the last ones of the file, or the first ones of a
second file. Their numbers follow those of the others. Rows added during a run, at the end of the file, get
the numbers after them, so that every row keeps its own:

    numbers   0 ... training ... | held_out_at ... held out ... | added ...

The index takes 16 bytes of memory a row. Files stay open, so that removing or replacing one changes nothing;
a row that was overwritten is noticed when it is read.
"""

import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NoReturn

import blake3
import xxhash

from node.coordinator.work.task_size import NO_DATA, DataSeen
from node.errors import ConfigError, Reason, RefusedError
from node.limits import ROW_BYTES
from node.task_options import column_of

DIGEST_BYTES: Final = 16


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
    ) -> None:
        """Index the files, which stay open from then on; blocking, about a second per 100 MB.

        Raises:
            ConfigError: a line is no JSON object or is too long, or there are too few rows.
        """
        digest = blake3.blake3()
        training = _RowFile(file, name)
        self._parts = [training]
        training.index(digest, at_most=known.held_out_at if known.rows else None)
        if held_out is not None:
            self._parts.append(_RowFile(held_out.file, held_out.name))
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
        if len(self) <= evaluation_rows:
            raise _too_few(evaluation_rows, f"leaves no row to train on: {name} has {len(self._parts[0])}")
        held_out_at = known.held_out_at if known.rows else len(self) - evaluation_rows
        self.evaluation = range(held_out_at, held_out_at + evaluation_rows)
        """Numbers of the rows that are never trained on."""
        self.prompts = len(self) - evaluation_rows
        """How many rows there are to train on."""

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
                        rule=f"{part.name} has no such column: {which} has {', '.join(found) or 'none'}",
                        fix="Name one of them, or what is inside one, such as reward_model.ground_truth."
                        if not lacking[0]
                        else "Correct or remove these rows.",
                    )

    def close(self) -> None:
        for part in self._parts:
            part.file.close()


class _RowFile:
    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file = file
        self.name = name
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
                _check_row(row, where=f"line {self._lines} of {self.name}")
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


def _check_row(row: bytes, *, where: str) -> None:
    if len(row) > ROW_BYTES:
        raise _bad_row(f"{where} is longer than {ROW_BYTES} bytes")
    try:
        content: Any = json.loads(row.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _bad_row(f"{where} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _bad_row(f"{where} is {type(content).__name__}, not a JSON object")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _too_few(evaluation_rows: int, rule: str) -> ConfigError:
    return ConfigError(
        key="coordinator.data.evaluation_rows",
        value=evaluation_rows,
        source="the configuration",
        rule=rule,
        fix="Lower it, or add rows.",
    )


def _bad_row(rule: str) -> ConfigError:
    return ConfigError(
        key="coordinator.data.file",
        value="...",
        source="the configuration",
        rule=rule,
        fix="Every line is one JSON object: correct or remove this one.",
    )
