"""Masters, optimizer and progress of a version, from which a restart goes on with the journal.

    <directory>/000000000042/masters/*.safetensors     float32 masters, see ``tensor_files``
                             optimizer/*.safetensors   AdamW's moments and step counts
                             index.json                progress, place in the journal, digests of the files
                                                       and of itself, see ``node.system.sealed``

A checkpoint is staged, synced and renamed: it is there whole or not at all. The one before it stays, and the
journal since then.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import blake3
import torch
from torch import Tensor

from learner.journal.checkpoint_index import (
    INDEX,
    CheckpointIndex,
    as_file,
    checkpoint_name,
    checkpoint_names,
    damaged,
    index_in,
)
from learner.journal.entry_rows import Origin
from learner.journal.progress import Progress
from learner.journal.restart import KEPT_CHECKPOINTS, JournalPlace
from learner.masters.tensor_files import load_tensors, save_tensors, shapes_in
from learner.masters.uncached_files import digest_of
from learner.model.model import Policy
from learner.model.rank_exchanges import Ranks
from node.errors import StartupError
from node.system import durable
from node.weights.format.layout import Layout

_MASTERS: Final = "masters"
_OPTIMIZER: Final = "optimizer"
_STAGED: Final = "staged-"


class CheckpointGoneError(StartupError):
    """The learner removed the checkpoint between its listing and its opening: there are newer ones."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardCopy:
    """One rank's part of a checkpoint's tensors, on the CPU."""

    parts: Mapping[str, Mapping[str, Tensor]]
    """By the name of their directory."""
    number: int
    """How many copies the rank had made with this one; all ranks make the same."""

    @classmethod
    def of(cls, policy: Policy, optimizer: torch.optim.Optimizer, *, number: int) -> Self:
        """Copy everything that the next step changes."""
        return cls(
            {_MASTERS: _copies(policy.tensors), _OPTIMIZER: _copies(_moments(policy, optimizer))}, number
        )


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointCopy:
    """A learner between two steps, on the CPU."""

    progress: Progress
    place: JournalPlace
    shard: ShardCopy
    ranks: Ranks
    """The ranks that have copies of the other shards."""


class CheckpointStore:
    """The checkpoints of one run in one directory."""

    def __init__(self, directory: Path, *, origin: Origin, keep_every_versions: int = 0) -> None:
        """Open or make the directory; keep the masters of every such multiple of versions, 0: of none.

        Raises:
            OSError: it cannot be made.
        """
        durable.make_directory(directory)
        self._directory = directory
        self._origin = origin
        self._keep_every_versions = keep_every_versions
        for staged in directory.glob(f"{_STAGED}*"):
            shutil.rmtree(staged, ignore_errors=True)

    def write(self, copy: CheckpointCopy) -> int:
        """Make a copy the newest checkpoint, durable on return; return the bytes written.

        Raises:
            OSError: the disk is full or failing; earlier checkpoints are untouched, and nothing is left of
                this one.
            RankLostError: another rank is gone, or does not answer.
        """
        name = checkpoint_name(copy.progress.version)
        path, staged = self._directory / name, self._directory / f"{_STAGED}{name}"
        if path.exists():  # nothing but the progress has changed since
            index = replace(index_in(path), progress=copy.progress, place=copy.place)
            durable.write(path / INDEX, (content := as_file(index)))
            return len(content)
        shutil.rmtree(staged, ignore_errors=True)
        is_staged = False
        try:
            self._stage(staged, copy)
            is_staged = True
            durable.rename(staged, path)
        except BaseException:
            if is_staged and not staged.exists():
                # The sync after the rename failed: remove the directory under a name that is no checkpoint's.
                path.rename(staged)
            shutil.rmtree(staged, ignore_errors=True)
            raise
        self._prune()
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def places(self) -> list[JournalPlace]:
        """Return where the journal was at each checkpoint from which a restart could go on."""
        names = checkpoint_names(self._directory)[-KEPT_CHECKPOINTS:]
        return [index_in(self._directory / name).place for name in names]

    def restore(self, load: Callable[[Path], None]) -> tuple[Progress, JournalPlace]:
        """Return what the newest checkpoint says, and pass its verified files to ``load``.

        Without one this is version 0, and nothing is loaded.

        Raises:
            StartupError: the newest checkpoint is damaged, or of another run or model.
        """
        names = checkpoint_names(self._directory)
        if not names:
            return Progress(version=0), JournalPlace()
        path = self._directory / names[-1]
        index = index_in(path)
        if difference := self._origin.difference(index.origin):
            raise StartupError(
                f"checkpoint {path} is of another run or model than this learner: {difference}",
                fix="Point learner.model_dir at the model the run began with, or node.state_dir elsewhere",
            )
        _verify(path, index, (_MASTERS, _OPTIMIZER))
        try:
            load(path)
        except (OSError, ValueError) as error:
            raise damaged(path, str(error)) from error
        return index.progress, index.place

    def _stage(self, staged: Path, copy: CheckpointCopy) -> None:
        staged.mkdir()
        for name, tensors in copy.shard.parts.items():
            (staged / name).mkdir()
            with copy.ranks.saving(staged / name, name, copy=copy.shard.number) as group:
                save_tensors(staged / name, tensors, group=group)
        files = {str(file.relative_to(staged)): digest_of(file) for file in staged.glob("*/*")}
        index = CheckpointIndex(self._origin, files, copy.progress, copy.place)
        (staged / INDEX).write_bytes(as_file(index))
        for path in (staged / _MASTERS, staged / _OPTIMIZER, staged / INDEX, staged):
            durable.sync(path)

    def _prune(self) -> None:
        for old in checkpoint_names(self._directory)[:-KEPT_CHECKPOINTS]:
            if self._keep_every_versions and int(old) % self._keep_every_versions == 0:
                shutil.rmtree(self._directory / old / _OPTIMIZER, ignore_errors=True)
            else:
                shutil.rmtree(self._directory / old, ignore_errors=True)


def load_into(policy: Policy, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load masters and moments, whatever layout they were saved in, from files that were verified.

    Raises:
        OSError: a file cannot be read.
        ValueError: they are not of this model.
    """
    load_tensors(path / _MASTERS, {name: one.detach() for name, one in policy.tensors.items()})
    moments = _empty_moments(policy, shapes_in(path / _OPTIMIZER))
    load_tensors(path / _OPTIMIZER, moments)
    optimizer.state.clear()
    for key_and_name, value in moments.items():
        key, _, name = key_and_name.partition("/")
        optimizer.state[policy.tensors[name]][key] = value


def begin_anew(policy: Policy, optimizer: torch.optim.Optimizer, masters: Path) -> None:
    """Load masters, and forget all that the optimizer has learned: its next step is as a run's first.

    Raises:
        OSError: a file cannot be read.
        ValueError: they are not of this model.
    """
    load_tensors(masters, {name: one.detach() for name, one in policy.tensors.items()})
    with torch.no_grad():
        for moments in optimizer.state.values():
            for moment in moments.values():
                moment.zero_()


@contextmanager
def opened_masters(directory: Path, version: int, *, layout: Layout) -> Iterator[Path]:
    """Yield where the float32 masters of a version are, verified; the learner may remove them meanwhile.

    Raises:
        CheckpointGoneError: the learner has removed them, which is also what an error of the body means then.
        StartupError: the checkpoint is damaged or of another model.
    """
    path = directory / checkpoint_name(version)
    try:
        index = index_in(path)
        if index.origin.layout_digest != layout.digest.hex():
            raise StartupError(
                f"checkpoint {path} is of another model than --model-dir",
                fix="Name the model that the run began with.",
            )
        _verify(path, index, (_MASTERS,))
        yield path / _MASTERS
    except (OSError, ValueError, StartupError) as error:
        if not path.exists():
            raise CheckpointGoneError(
                f"version {version} was removed while it was being read: the learner has made newer ones",
                fix="Export the newest, or set learner.keep_every_versions to keep more of them.",
            ) from error
        if isinstance(error, StartupError):
            raise
        raise damaged(path, str(error)) from error


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _moments(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": value
        for name, parameter in policy.parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _empty_moments(policy: Policy, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return tensors to load moments into: laid out as their parameter, or a number beside it."""
    moments = {}
    of_model = {span.name for span in policy.layout.tensors}
    for key_and_name, shape in shapes.items():
        name = key_and_name.partition("/")[2]
        if name not in of_model:
            raise ValueError(f"there is no parameter for {key_and_name!r}")
        parameter = policy.parameters.get(name)
        if parameter is None:
            continue  # of another stage
        same = shape == parameter.shape
        moments[key_and_name] = (
            torch.zeros_like(parameter.detach()) if same else torch.zeros(shape, device=parameter.device)
        )
    return moments


def _verify(path: Path, index: CheckpointIndex, parts: Sequence[str]) -> None:
    """Compare the files of some parts of a checkpoint with what it says of itself."""
    stated = {name: digest for name, digest in index.files.items() if name.partition("/")[0] in parts}
    there = {str(file.relative_to(path)) for part in parts for file in (path / part).glob("*")}
    for name in sorted(stated.keys() ^ there):
        raise damaged(path, f"{name} is {'missing' if name in stated else 'not one of its files'}")
    for name, digest in stated.items():
        try:
            found = _blake3(path / name)
        except OSError as error:
            raise damaged(path, str(error)) from error
        if found != digest:
            raise damaged(path, f"{name} does not have its digest: it was cut short or changed")


def _blake3(path: Path) -> str:
    return blake3.blake3().update_mmap(path).hexdigest()
