"""Where the learner's log of steps lies, parts that are full and the file that grows; and its lines."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.errors import StartupError

_OF_A_GROUP: Final = ("group_id", "sampler_id", "staleness_versions")

_PART: Final = re.compile(r"-(\d{12})$")


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A full part of a log."""

    version: int
    """Version of its last line."""
    path: Path


def part_of(log: Path, *, version: int) -> Path:
    """Return the name of the part of ``log`` whose last line is of ``version``."""
    return log.with_name(f"{log.stem}-{version:012}{log.suffix}")


def parts_of(log: Path) -> list[Part]:
    """Return the full parts beside a log, oldest first, without those that were moved away or compressed."""
    named = ((_PART.search(path.stem), path) for path in log.parent.glob(f"{log.stem}-*{log.suffix}"))
    return sorted(Part(int(match[1]), path) for match, path in named if match)


def files_of(log: Path) -> list[Path]:
    """Return the files of a log in the order of their lines; the growing one may be missing for a moment."""
    parts = [part.path for part in parts_of(log)]
    return parts if parts and not log.exists() else [*parts, log]


def log_lines(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a learner's log of steps that are written to their ends, its full parts first.

    Raises:
        StartupError: the log is not there, or a line of it is not a step's.
    """
    try:
        for path in files_of(log):
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):  # else it is being written
                        yield _parsed(line, f"line {number} of {path}")
    except FileNotFoundError as error:
        raise StartupError(
            f"there is no log of steps at {log}", fix="It is learner/steps.jsonl in the learner's state_dir."
        ) from error


def _parsed(line: bytes, what: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(line)
        _ = fields["version"], [[group[name] for name in _OF_A_GROUP] for group in fields["groups"]]
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(
            f"{what} is not a step of a learner: {error!r}",
            fix="Give the learner's steps.jsonl, as it was written.",
        ) from error
    return fields
