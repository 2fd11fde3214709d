"""Which files a data set's path stands for, and whether all of its shards are there."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_SHARD: Final = re.compile(r"(?P<stem>.+?)-(?P<number>\d{4,6})-of-(?P<total>\d{4,6})(?P<rest>[-.].*)?")
"""A shard's name as the Hub, ``datasets`` and TensorFlow write it: train-00000-of-00002.parquet."""

_SPLITS: Final = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})


class ShardError(ValueError):
    """Some shards of a data set are not there."""


def files_of(path: Path) -> list[Path]:
    """Return the file of a path, or the files that match it, in the order of their names.

    Raises:
        FileNotFoundError: it matches none.
        ShardError: it is one shard of several, or some are missing.
    """
    files = matching(path)
    if not files:
        raise FileNotFoundError(2, "No such file, nor any that matches", str(path))
    if lacking := _lacking(files):
        what = f"{files[0].name} is one shard of several, " if len(files) == 1 else ""
        raise ShardError(
            f"{what}{lacking}: name all of them, as in {_pattern(files[0])!r}, or the directory; download "
            "those that are missing; or give a shard that is meant alone a name without -of-"
        )
    return files


def matching(path: Path) -> list[Path]:
    """Return the path itself where it is there, or the files that it matches as a pattern."""
    if path.exists() or not any(sign in path.name for sign in "*?["):
        return [path]
    return sorted(file for file in path.parent.glob(path.name) if file.is_file())


def check_shards(directory: Path, split: str) -> None:
    """Check that a directory has all shards of a split, as far as their names tell; ShardError if not."""
    files = [file for file in directory.rglob("*-of-*") if not _is_of_another_split(file, directory, split)]
    if lacking := _lacking(files):
        raise ShardError(f"{lacking}: download what is missing")


def _lacking(files: Iterable[Path]) -> str:
    """Return which shards are missing of those that files are of; empty: none."""
    shards: defaultdict[tuple[Path, str, int, str], set[int]] = defaultdict(set)
    for file in files:
        if (found := _SHARD.fullmatch(file.name)) is not None:
            total = int(found["total"])
            shards[file.parent, found["stem"], total, _suffix(found)].add(int(found["number"]))
    for (_, stem, total, _), numbers in shards.items():
        if len(numbers) < total:
            first = 1 if max(numbers) == total else 0
            gap = next(number for number in range(first, total + first) if number not in numbers)
            return f"{total - len(numbers)} of the {total} shards of {stem} are missing, such as number {gap}"
    return ""


def _is_of_another_split(file: Path, directory: Path, split: str) -> bool:
    words = set(re.split(r"[^a-z]+", str(file.relative_to(directory)).lower()))
    return split.lower() not in words and bool(words & _SPLITS)


def _pattern(file: Path) -> str:
    found = _SHARD.fullmatch(file.name)
    return file.name if found is None else f"{found['stem']}-*{_suffix(found)}"


def _suffix(shard: re.Match[str]) -> str:
    """Return .parquet of a shard's name; the Hub may put a digest before it."""
    return "".join((shard["rest"] or "").partition(".")[1:])
