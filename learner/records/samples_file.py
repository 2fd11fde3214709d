"""``samples.jsonl``, bounded: a full file becomes ``samples.jsonl.1``, and the one of that name goes.

One process appends, any number read. A line that a kill cut in half is passed over by readers.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from learner.records.group_sample import GroupSample
from node import durable

FILE_NAME: Final = "samples.jsonl"

FILE_BYTES: Final = 32 << 20
"""Of one file; two are kept. A thousand groups of eight completions of 4000 characters."""

TAIL_BYTES: Final = 4 << 20
"""Read for the newest groups; the longest line has 2 MiB."""


FOLLOWED_GROUPS: Final = 1000
"""Far more than a learner writes down between two looks."""


class SamplesFile:
    """The file of a learner's state directory."""

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._file_bytes = file_bytes

    def append(self, groups: Iterable[GroupSample]) -> None:
        """Append groups, after rotation where the file is full.

        Raises:
            OSError: the disk is full or failing; no line is cut in half.
        """
        if self._path.exists() and self._path.stat().st_size >= self._file_bytes:
            self._path.replace(self._older)
        durable.append(self._path, "".join(f"{group.to_json()}\n" for group in groups).encode())

    def newest(self, count: int) -> list[GroupSample]:
        """Return the newest groups, oldest first: at most ``count``, of the last TAIL_BYTES of each file."""
        groups: list[GroupSample] = []
        for path in (self._path, self._older):
            if len(groups) < count:
                with _opened(path) as file:
                    groups = [*_parsed(_tail(file)), *groups]
        return groups[max(0, len(groups) - count) :]

    def all(self) -> Iterator[GroupSample]:
        """Yield every group that is kept, oldest first."""
        for path in (self._older, self._path):
            with _opened(path) as file:
                yield from _parsed(file)

    def appended(self) -> Iterator[list[GroupSample]]:
        """Yield, again and again for ever, the groups appended since the time before; at first, none."""
        seen = {_key(group) for group in self.newest(FOLLOWED_GROUPS)}
        yield []
        while True:
            newest = {_key(group): group for group in self.newest(FOLLOWED_GROUPS)}
            yield [group for key, group in newest.items() if key not in seen]
            seen = set(newest)


def _opened(path: Path) -> BinaryIO:
    """Open a file; a missing one, as during rotation, reads as empty."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return Path(os.devnull).open("rb")


def _key(group: GroupSample) -> tuple[float, int, str]:
    return group.at_s, group.version, group.group_id


def _tail(file: BinaryIO) -> list[bytes]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    lines = file.read().splitlines()
    return lines if size <= TAIL_BYTES else lines[1:]


def _parsed(lines: Iterable[bytes]) -> Iterator[GroupSample]:
    for line in lines:
        try:
            yield GroupSample.parse(line)
        except ValueError:
            continue  # half a line of a process that was killed
