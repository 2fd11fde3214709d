"""The rows of a data set: JSON objects in a JSONL file, read from disk when they are leased.

    file --every line checked, its place and checksum kept--> Rows --row(index)--> bytes

The last rows are for evaluation and are never trained on. The index takes 16 bytes of memory a row. The file
stays open, so that removing or replacing it changes nothing; a row that was overwritten is noticed when it is
read.
"""

import json
import os
from array import array
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NoReturn

import blake3
import xxhash

from node.errors import ConfigError, Reason, RefusedError
from node.limits import ROW_BYTES

DIGEST_BYTES: Final = 16


class Rows:
    """An indexed file. ``row`` may be called from any thread."""

    def __init__(self, file: BinaryIO, *, name: str, evaluation_rows: int = 0) -> None:
        """Index ``file``, which stays open from then on; blocking, about a second per 100 MB.

        Args:
            name: Of the data set, for messages.
            evaluation_rows: How many of the last rows are never trained on.
        Raises:
            ConfigError: a line is no JSON object or is too long, or there are too few rows.
        """
        self._file = file
        self._name = name
        self._starts = array("q")
        self._checksums = array("Q")
        self.longest_bytes = 0
        """Of any row."""
        digest = blake3.blake3()
        number, start = 0, 0
        while line := file.readline(ROW_BYTES + 2):
            number += 1
            if row := line.strip():
                _check_row(row, where=f"line {number} of {name}")
                self._starts.append(start)
                self._checksums.append(xxhash.xxh3_64_intdigest(row))
                self.longest_bytes = max(self.longest_bytes, len(row))
                digest.update(len(row).to_bytes(8) + row)
            start += len(line)
        self._starts.append(start)
        self.digest: bytes = digest.digest(length=DIGEST_BYTES)
        """Of all rows in their order; blank lines and line ends do not count."""
        if len(self) <= evaluation_rows:
            raise ConfigError(
                key="coordinator.data.evaluation_rows",
                value=evaluation_rows,
                source="the configuration",
                rule=f"leaves no row to train on: {name} has {len(self)}",
                fix="Lower it, or add rows.",
            )
        self.training = range(len(self) - evaluation_rows)
        """Indices of the rows to train on."""
        self.evaluation = range(len(self) - evaluation_rows, len(self))
        """Indices of the rows that are never trained on."""

    def __len__(self) -> int:
        return len(self._checksums)

    def row(self, index: int) -> bytes:
        """Read one row, a JSON object; blocking.

        Raises:
            RefusedError: DISK; it cannot be read, or is not what it was when it was indexed.
        """
        start, end = self._starts[index], self._starts[index + 1]
        try:
            row = os.pread(self._file.fileno(), end - start, start).strip()
        except OSError as error:
            raise self._unreadable(index, str(error)) from error
        if xxhash.xxh3_64_intdigest(row) != self._checksums[index]:
            raise self._unreadable(index, "it was changed since the coordinator started")
        return row

    def check_columns(self, columns: Mapping[str, str]) -> None:
        """Check that the first row has the columns that the task's options name.

        Args:
            columns: By option.
        Raises:
            ConfigError: it lacks one.
        """
        found = json.loads(self.row(0))
        for option, column in columns.items():
            if column not in found:
                raise ConfigError(
                    key=f"coordinator.task_options.{option}",
                    value=column,
                    source="the configuration or the option's default",
                    rule=f"{self._name} has no such column: its first row has {', '.join(found) or 'none'}",
                    fix="Name one of them.",
                )

    def close(self) -> None:
        self._file.close()

    def _unreadable(self, index: int, why: str) -> RefusedError:
        return RefusedError(
            Reason.DISK,
            f"row {index} of {self._name} cannot be read: {why}",
            fix="put the file back as it was and restart the coordinator",
        )


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


def _bad_row(rule: str) -> ConfigError:
    return ConfigError(
        key="coordinator.data.file",
        value="...",
        source="the configuration",
        rule=rule,
        fix="Every line is one JSON object: correct or remove this one.",
    )
