"""The journal on disk: one append and one fsync for each step.

    <directory>/000000000003.segment    see ``records``

A segment begins with the first entry after a start of the learner, and after the copy for a checkpoint was
made. Older ones are removed once no checkpoint needs them. Nothing is ever written over.

Blocking, and not thread-safe: one thread at a time.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from learner.journal.progress import Entry, Progress
from learner.journal.records import (
    DamagedJournalError,
    Origin,
    Segment,
    SegmentHeader,
    entry_record,
    header_record,
    read_segment,
)
from learner.journal.restart import JournalPlace, RestartError, RestartPlan, plan_restart, surplus_segments
from node import durable
from node.errors import StartupError
from node.policy import PolicyVersion

_SUFFIX: Final = ".segment"
_SALT_BYTES: Final = 16


class StepJournal:
    """Appends entries, and forgets those that checkpoints have made worthless."""

    def __init__(
        self, directory: Path, *, origin: Origin, learner_epoch: int, place: JournalPlace, since: JournalPlace
    ) -> None:
        """Go on at ``place``, where no segment is yet.

        Args:
            since: place of the newest checkpoint.
        Raises:
            OSError: the directory cannot be made or read.
        """
        durable.make_directory(directory)
        self._directory = directory
        self._origin = origin
        self._learner_epoch = learner_epoch
        self._place = place
        self._key: bytes | None = None
        """None: the next entry begins a segment."""
        self._segment_bytes = 0
        self._sizes = {number: _path(directory, number).stat().st_size for number in _numbers(directory)}
        self._new_since = since.next_segment

    @property
    def size_bytes(self) -> int:
        """Size of all segments."""
        return sum(self._sizes.values())

    @property
    def new_bytes(self) -> int:
        """Size of the segments since ``roll``, or since the newest checkpoint."""
        return sum(size for number, size in self._sizes.items() if number >= self._new_since)

    def append(self, entry: Entry, blobs: Sequence[bytes] = (), *, version: int) -> None:
        """Write an entry; durable on return.

        Args:
            blobs: see ``entry_record``.
            version: the learner's before it.
        Raises:
            OSError: the disk is full or failing; the entry is not there, write it again.
        """
        if self._key is None:
            self._begin(entry, blobs, version=version)
            return
        number = self._place.next_segment - 1
        path = _path(self._directory, number)
        if path.stat().st_size > self._segment_bytes:
            os.truncate(path, self._segment_bytes)  # a failing disk did not take back what it refused
        previous = bytes.fromhex(self._place.digest)
        record, digest = entry_record(entry, blobs, previous=previous, key=self._key)
        durable.append(path, record)
        self._appended(number, len(record), digest)

    def roll(self) -> JournalPlace:
        """Let the next entry begin a segment; return the place of all that came before."""
        self._key = None
        self._new_since = self._place.next_segment
        return self._place

    def cut(self, places: Sequence[JournalPlace]) -> None:
        """Remove what no checkpoint needs, given the places of those that are kept."""
        for number in surplus_segments(sorted(self._sizes), places=places):
            with suppress(OSError):  # the next cut tries again
                _path(self._directory, number).unlink(missing_ok=True)
                del self._sizes[number]

    def _begin(self, entry: Entry, blobs: Sequence[bytes], *, version: int) -> None:
        number = self._place.next_segment
        header = SegmentHeader(
            origin=self._origin,
            number=number,
            version=version,
            learner_epoch=self._learner_epoch,
            previous_digest=self._place.digest,
            salt=secrets.token_hex(_SALT_BYTES),
        )
        first, key = header_record(header)
        record, digest = entry_record(entry, blobs, previous=key, key=key)
        durable.write(_path(self._directory, number), first + record)
        self._key, self._segment_bytes = key, 0
        self._appended(number, len(first) + len(record), digest)

    def _appended(self, number: int, size_bytes: int, digest: bytes) -> None:
        self._segment_bytes += size_bytes
        self._sizes[number] = self._segment_bytes
        self._place = JournalPlace(number + 1, digest.hex())


def read_journal(
    directory: Path,
    start: Progress,
    place: JournalPlace,
    *,
    origin: Origin | None,
    published: PolicyVersion | None,
) -> RestartPlan:
    """Return the way from a checkpoint to where the learner stopped; its records are views of the files.

    The arguments are those of ``plan_restart``.

    Raises:
        StartupError: the journal is damaged, of another run, or incomplete; names segment, entry and fix.
        OSError: it cannot be read.
    """
    numbers = [number for number in _numbers(directory) if number >= place.next_segment]
    segments = []
    for number in numbers:
        path = _path(directory, number)
        try:
            segments.append(_read(path))
        except DamagedJournalError as error:
            raise _unusable(path, str(error)) from error
    try:
        return plan_restart(start, place, segments, origin=origin, published=published)
    except RestartError as error:
        raise _unusable(
            _path(directory, error.segment) if error.segment else directory, str(error)
        ) from error


def _read(path: Path) -> Segment:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data: mmap.mmap | bytes = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
    return read_segment(memoryview(data))


def _unusable(path: Path, what: str) -> StartupError:
    return StartupError(
        f"journal {path} cannot be used: {what}",
        fix="Restore journal, checkpoints and published of the learner's state directory from one copy. "
        "Without one, export the newest version (`heterorl-node export`) and begin a new run with it: steps "
        "that others were told of cannot be taken with other groups.",
    )


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}{_SUFFIX}"


def _numbers(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))
    return sorted(int(name) for name in names if name.isdecimal())
