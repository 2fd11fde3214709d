"""Where the learner's log of steps lies: parts that are full, and the file that grows."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
