"""Rows of text files: JSON Lines, JSON arrays and CSV, compressed or not, in UTF-8, UTF-16 or UTF-32.

A file of JSON Lines in UTF-8 is used where it is (``is_plain``). Everything else is read row by row, to be
written out as such a file. What is no text of rows is refused with the way to go.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from node.coordinator.data.row_json import raw_json, read_json
from node.questions.json_values import kind_of_value
from node.values.limits import ROW_BYTES

_MAGIC_BYTES: Final = 64

_READ_CHARACTERS: Final = 8 * ROW_BYTES
"""Read at once: more than a row with all of its characters escaped."""

_COMPRESSED: Final[Mapping[bytes, Callable[[BinaryIO], Any]]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
"""First bytes -> what reads them."""

_PACKED: Final = (".gz", ".bz2", ".xz")

_OTHERS: Final[Mapping[bytes, str]] = {
    b"PK\x03\x04": "a zip archive or a workbook: unpack it, or save the table as CSV",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it with zstd -d",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"PAR1": "parquet: give it a name that ends in .parquet",
    b"ARROW1": "an Arrow file: name the directory that datasets saved, or save it as parquet",
    b"SQLite format 3": "a database: export the table as CSV",
    b"\x80\x04": "a pickle, which is never read: write JSON Lines instead",
    b"\x80\x05": "a pickle, which is never read: write JSON Lines instead",
    b"Obj\x01": "Avro: write JSON Lines or parquet instead",
    b"version https://git-lfs": "a pointer of Git LFS, not the data: run git lfs pull where it was cloned",
    b"<!DOCTYPE": "a web page, not the data: download the file itself",
    b"<html": "a web page, not the data: download the file itself",
}
"""First bytes of what is no text of rows -> what it is and what to do."""

_DELIMITERS: Final = ",\t;|"


def refuse_others(head: bytes) -> None:
    """Raise ValueError where a file's first bytes show that it holds no rows."""
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise ValueError(f"it is {what}")


def is_plain(path: Path) -> bool:
    """Whether a file is JSON Lines in UTF-8, or so far from everything else that it is to be read as such.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something that holds no rows.
    """
    with path.open("rb") as file:
        head = file.read(ROW_BYTES + 2)
    if any(map(head.startswith, _COMPRESSED)) or _table_suffix(path) or _encoding(head) != "utf-8":
        return False
    refuse_others(head)
    start = head.lstrip()
    if start.startswith(b"["):
        return False
    line = start.partition(b"\n")[0].rstrip()
    # The first line of an object that is printed over several, or a row with a comma behind it.
    return not (line.startswith(b"{") and line.endswith((b"{", b"[", b",")) and _is_no_row(line))


def text_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a text file that is not plain.

    Raises:
        OSError: it cannot be read.
        ValueError: a part of it is no row, or what it is compressed in is damaged.
    """
    with ExitStack() as opened:
        raw = opened.enter_context(path.open("rb"))
        head = raw.peek(_MAGIC_BYTES)
        reader = next((reader for magic, reader in _COMPRESSED.items() if head.startswith(magic)), None)
        try:
            file = raw if reader is None else opened.enter_context(reader(raw))
            head = file.peek(_MAGIC_BYTES)
            refuse_others(head)
            text = opened.enter_context(io.TextIOWrapper(file, encoding=_encoding(head), newline=""))
            yield from _table_rows(text) if _table_suffix(path) else _json_rows(text)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"it is not {error.encoding}: {error.reason}; convert it, as by iconv -f LATIN1 -t UTF-8"
            ) from error
        except (EOFError, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"its compressed data is damaged: {error}; copy it again") from error


def _encoding(head: bytes) -> str:
    if not head:
        return "utf-8"
    return json.detect_encoding(head[:4])


def _table_suffix(path: Path) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in (".csv", ".tsv", ".tab")


def _is_no_row(line: bytes) -> bool:
    try:
        read_json(line.decode())
    except ValueError:
        return True
    return False


def _table_rows(text: IO[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table whose first line names its columns; every value is a text, or null."""
    csv.field_size_limit(4 * ROW_BYTES)
    first = text.readline()
    delimiter = max(_DELIMITERS, key=lambda sign: len(next(csv.reader([first], delimiter=sign), [])))
    reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) < len(header):
            raise ValueError("two columns of its first line have the same name")
        for values in reader:
            if not values:
                continue
            if len(values) != len(header):
                raise ValueError(
                    f"line {reader.line_num} has {len(values)} fields, and the first line names "
                    f"{len(header)} columns; put fields that hold {delimiter!r} in quotes"
                )
            yield {name: value or None for name, value in zip(header, values, strict=True)}
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is not CSV: {error}") from error


def _json_rows(text: IO[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of an array, or those that follow each other, with or without commas between."""
    buffer = text.read(_READ_CHARACTERS)
    at = len(buffer) - len(buffer.lstrip())
    is_array = buffer.startswith("[", at)
    at, found, is_all = at + is_array, 0, False
    while True:
        at = _next_value(buffer, at)
        if len(buffer) - at < _READ_CHARACTERS and not is_all:
            more = text.read(_READ_CHARACTERS)
            buffer, at, is_all = buffer[at:] + more, 0, not more
            continue
        if at == len(buffer) and is_array:
            raise ValueError(f"after {found} rows it ends in the middle of its list; copy it again")
        if at == len(buffer):
            return
        if is_array and buffer[at] == "]":
            if rest := buffer[at + 1 :].strip():
                raise ValueError(f"after its list of {found} rows there is something else: {rest!r:.60}")
            return
        try:
            row, end = raw_json(buffer, at)
        except ValueError as error:
            what = buffer[at : at + 60]
            raise ValueError(f"after {found} rows, {what!r} is not a row of JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"after {found} rows there is {kind_of_value(row)}, not an object: {row!r:.60}")
        at, found = end, found + 1
        yield row


def _next_value(text: str, at: int) -> int:
    """Return where the next value begins, or the text ends."""
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at
