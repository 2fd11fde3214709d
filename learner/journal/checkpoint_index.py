"""The index of a checkpoint: its version, progress and place in the journal. Needs no torch.

The index.json of a checkpoint has a digest of each of its files, and of itself. The files themselves are the
business of ``learner.journal.checkpoint``.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from learner.journal.entry_rows import Origin
from learner.journal.progress import Progress
from learner.journal.restart import JournalPlace
from learner.journal.step_journal import read_journal
from learner.step_log import RollbackLine, StepLine
from learner.step_numbers import BatchFigures, StepNumbers
from node.errors import StartupError
from node.system.sealed import sealed, unsealed

CHECKPOINTS: Final = "checkpoints"
"""Directory of a learner's state."""

FORMAT: Final = 4
"""Release 0.3, whose journal had segments, wrote 3; 0.2, without a digest of index.json, 2."""

INDEX: Final = "index.json"
_OLD_INDEX: Final = "progress.json"
_UNSEALED: Final = b', "format": 2}'
"""The end of an index that older software wrote, and no flipped bit makes of a newer one's."""


def checkpoint_name(version: int) -> str:
    """Return the name of a version's checkpoint."""
    return f"{version:012d}"


def checkpoint_names(directory: Path) -> list[str]:
    """Return the names of the checkpoints in a directory, the oldest first."""
    return sorted(path.name for path in directory.iterdir() if path.name.isdecimal())


def versions_in(directory: Path) -> list[int]:
    """Return the versions with a checkpoint in a directory that a learner may be writing to, ascending."""
    return [int(name) for name in checkpoint_names(directory)] if directory.is_dir() else []


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Content of index.json."""

    origin: Origin
    files: dict[str, str]
    """Hex digest of each file, by its path within the checkpoint."""
    progress: Progress
    place: JournalPlace
    format: int = FORMAT


_AS_INDEX: Final = TypeAdapter(CheckpointIndex)


def newest_index(directory: Path) -> CheckpointIndex | None:
    """Return what the newest checkpoint says of itself; None: there is none.

    Raises:
        StartupError: it is damaged.
    """
    names = checkpoint_names(directory) if directory.is_dir() else []
    return index_in(directory / names[-1]) if names else None


def progress_in(state: Path) -> Progress:
    """Return the progress of a learner, which may be running, from its state directory.

    Raises:
        StartupError: checkpoint or journal are damaged.
        OSError: a file was removed meanwhile: try again.
    """
    index = newest_index(state / CHECKPOINTS)
    progress, place = (Progress(0), JournalPlace()) if index is None else (index.progress, index.place)
    origin = None if index is None else index.origin
    for record in read_journal(state, progress, place, origin=origin, published=None).records:
        progress = progress.after(record.entry, window=1)
    return progress


def as_file(index: CheckpointIndex) -> bytes:
    """Return the content of an index."""
    return sealed(json.dumps(asdict(replace(index, format=FORMAT))))


def index_in(path: Path) -> CheckpointIndex:
    """Return what a checkpoint says of itself.

    Raises:
        StartupError: it is damaged, or was written by a version of this program that is too old or too new.
    """
    if (path / _OLD_INDEX).exists():
        raise StartupError(
            f"checkpoint {path} was written at every step, as heterorl-node did before it had a journal",
            fix="Begin a new run: `heterorl-node export` of the version that wrote it makes the base model.",
        )
    try:
        data = (path / INDEX).read_bytes()
        document = unsealed(data, must_be_sealed=not data.endswith(_UNSEALED))
        if document["format"] < FORMAT:
            document["place"] = {"next_segment": document["place"]["next_segment"]}
            if document["progress"]["step"] is not None:
                document["progress"]["step"] = _of_older(document["progress"]["step"])
        index = _AS_INDEX.validate_python(document)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise damaged(path, f"{INDEX}: {error}") from error
    if index.format not in (2, 3, FORMAT):
        raise StartupError(
            f"checkpoint {path} has format {index.format}, this version of heterorl-node reads {FORMAT}",
            fix="Run the version that wrote it, or begin a new run with what it exports.",
        )
    if index.progress.version != int(path.name):
        raise damaged(path, f"{INDEX} says it is version {index.progress.version}")
    return index


def _of_older(line: dict[str, Any]) -> dict[str, Any]:
    """Return the newest step or rollback of formats 2 and 3 as today's, whose numbers are in one place."""
    known = {**line["report"], **(line["figures"] or {}), **line}
    if known.get("restored_version") is not None:
        return {one.name: known[one.name] for one in fields(RollbackLine)}
    known["batch"] = {one.name: known[one.name] for one in fields(BatchFigures)}
    known["numbers"] = {one.name: known[one.name] for one in fields(StepNumbers) if one.name in known}
    return {one.name: known[one.name] for one in fields(StepLine) if one.name in known}


def damaged(path: Path, what: str) -> StartupError:
    """Return the error of a checkpoint that cannot be used."""
    return StartupError(
        f"checkpoint {path} is damaged: {what}",
        fix="Remove the directory: the learner then goes on from the checkpoint before it, or from the base "
        "model, and takes the steps in the journal again. Or restore the directory from a copy.",
    )
