"""Finished cells on disk, compressed, one line of JSON each: a run that was cut off goes on where it was.

Every line is a gzip member of its own, so that a line is whole or not there.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.staleness_lab.cells import Cell, Outcome


class Results:
    """The outcomes kept in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        if path.exists():
            whole = b""
            for member in _members(path.read_bytes()):
                whole += member
                outcome = Outcome.from_fields(json.loads(gzip.decompress(member)))
                self._outcomes[outcome.cell.key] = outcome
            if len(whole) < path.stat().st_size:
                path.write_bytes(whole)

    def __contains__(self, cell: Cell) -> bool:
        """Return whether this very cell is finished."""
        return cell.key in self._outcomes

    def of(self, cells: Iterable[Cell]) -> list[Outcome]:
        """Return the outcomes of those cells that are finished, in their order."""
        return [self._outcomes[cell.key] for cell in cells if cell in self]

    def add(self, outcome: Outcome) -> None:
        """Write an outcome so that it survives whatever happens next."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(gzip.compress(outcome.to_line().encode() + b"\n", mtime=0))
            file.flush()
            os.fsync(file.fileno())
        self._outcomes[outcome.cell.key] = outcome


def _members(data: bytes) -> Iterator[bytes]:
    """Yield the whole members at the beginning of a file of gzip members; one that was cut off ends it."""
    while data:
        decoder = zlib.decompressobj(wbits=31)
        try:
            decoder.decompress(data)
        except zlib.error:
            return
        if not decoder.eof:
            return
        yield data[: len(data) - len(decoder.unused_data)]
        data = decoder.unused_data
