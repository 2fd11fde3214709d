"""Groups as they are written down for people: lines of ``samples.jsonl``, which is bounded. Free of torch.

A full file replaces ``samples.jsonl.1``. One process appends, any number read; readers skip a line that a
kill cut in half.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import TypeAdapter

from node.system import durable
from node.system.clock import moment
from node.text.visible_text import visible

FILE_NAME: Final = "samples.jsonl"

FILE_BYTES: Final = 32 << 20
"""Size of one file; two are kept. A thousand groups of eight completions of 4000 characters."""

TAIL_BYTES: Final = 4 << 20
"""Read for the newest groups; the longest line has 2 MiB."""


@dataclass(frozen=True, slots=True)
class CompletionSample:
    """One completion as text."""

    text: str
    """Special tokens included; from a stranger's machine, it may hold anything."""
    reward: float
    advantage: float
    """Reward minus the mean of its group, over its standard deviation, as in GRPO; other objectives scale it
    in their own way."""
    tokens: int
    finish: str
    """The reason it ended: end, stop or length."""
    oldest_version: int
    """Oldest and newest version that drew a token."""
    newest_version: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Measured by the grader besides the reward."""

    @property
    def heading(self) -> str:
        """One line on it, for people."""
        oldest, newest = self.oldest_version, self.newest_version
        versions = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        return (
            f"reward {self.reward:.4g}, advantage {self.advantage:+.2f}, {self.tokens} tokens, "
            f"finish: {self.finish}, sampled from {versions}"
            + "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        )


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A group that a step consumed."""

    version: int
    """The version that the step made; 0: it arrived before the first step."""
    at_s: float
    """Unix seconds, when it was made; of a version 0, when the coordinator took the group in."""
    group_id: str
    sampler_id: str
    task: str
    prompt_index: int
    prompt: str
    prompt_tokens: int
    staleness_versions: int
    group_size: int
    """Completions of the group; the ones of middle rewards may be left out below."""
    completions: tuple[CompletionSample, ...]

    @property
    def heading(self) -> str:
        """One line on it, for people; names of strangers are made visible in it."""
        shown = len(self.completions)
        of = f"{shown} of {self.group_size}" if shown < self.group_size else str(shown)
        names = (self.group_id, self.sampler_id, self.task)
        group_id, sampler_id, task = (visible(name).replace("\n", " ") for name in names)
        return (
            f"version {self.version}, {moment(self.at_s)}: group {group_id}, "
            f"{of} completions by {sampler_id}, "
            f"{self.staleness_versions} versions stale; {task}, prompt {self.prompt_index}, "
            f"{self.prompt_tokens} tokens"
        )

    def to_json(self) -> str:
        """Return one line of ASCII: no character of a completion reaches a terminal as it is."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str | bytes) -> "GroupSample":
        """Read such a line.

        Raises:
            ValueError: it is not one.
        """
        return _GROUP.validate_json(line)


_GROUP: Final = TypeAdapter(GroupSample)


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


def _opened(path: Path) -> BinaryIO:
    """Open a file; a missing one, as during rotation, reads as empty."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return Path(os.devnull).open("rb")


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
