"""Everything a learner needs to take the next step exactly as if it had never stopped.

    <directory>/000000000042/model.safetensors        float32 masters
                             optimizer.safetensors    AdamW's moments and step counts
                             progress.json            the rest, and the digests of the two

A checkpoint is staged, synced and renamed: it is there whole or not at all. The one before it stays, for a
person to fall back on. It is never loaded automatically: the version after it may be published, and making
that number again with other weights would fork the run.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import blake3
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.objective.slow_fast import EntropySwitch
from learner.step_log import StepLine
from learner.training.model import Policy
from node import durable
from node.errors import StartupError
from node.run import StepRecord
from node.weights.format.layout import Layout

_MODEL: Final = "model.safetensors"
_OPTIMIZER: Final = "optimizer.safetensors"
_PROGRESS: Final = "progress.json"
_KEPT: Final = 2
_BEFORE_ANNOUNCED: Final = 2
"""Versions kept before the announced one: the coordinator announces newer ones while it writes down that an
evaluation begins."""
_KEPT_WHILE_EVALUATED: Final = 4
_FURTHER_KEPT: Final = 60
_FURTHER_KEPT_BYTES: Final = 8 << 30
"""Limits on masters kept beyond those four, where many steps pass between two heartbeats."""
_STAGED: Final = "staged-"


class CheckpointGoneError(StartupError):
    """The learner removed the checkpoint between its listing and its opening: there are newer ones."""


@dataclass(frozen=True, slots=True)
class BestVersion:
    """The version whose masters are kept for ``heterorl-node export --best``."""

    version: int
    reward_mean: float | None = None
    """Mean training reward of the window that ended with it; None: best in evaluations."""

    def is_beaten_by(self, reward_mean: float) -> bool:
        """Whether a mean training reward is better; never than what was evaluated."""
        return self.reward_mean is not None and reward_mean > self.reward_mean


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of training apart from the tensors."""

    version: int
    step: StepLine | None = None
    """The step that made this version."""
    unacknowledged: tuple[StepRecord, ...] = ()
    """Step records the coordinator may not have, this version's included."""
    trained_slots: tuple[tuple[int, int], ...] = ()
    """All slots ever trained on; see ``learner.intake.trained_slots``."""
    recent_rewards: tuple[float, ...] = ()
    """Mean reward of the newest batches, oldest first; at most ``stop_window_versions``."""
    best: BestVersion | None = None
    """None: not known yet."""
    evaluating_version: int | None = None
    """Under evaluation, and kept: it may become the best."""
    announced_version: int = 0
    """The newest that was announced when ``evaluating_version`` was told. Where no sampler had got to that
    one yet, another soon after it may be evaluated instead."""
    entropy_switch: EntropySwitch = field(default_factory=EntropySwitch)
    """Whether SFPO's fast steps are still taken."""

    @property
    def is_evaluated(self) -> bool:
        """Whether the coordinator evaluates versions."""
        return self.evaluating_version is not None or bool(self.best and self.best.reward_mean is None)


@dataclass(frozen=True, slots=True)
class _Saved:
    """Content of progress.json."""

    layout_digest: str
    file_digests: dict[str, str]
    progress: Progress


_SAVED: Final = TypeAdapter(_Saved)


class CheckpointStore:
    """The checkpoints of one run in one directory."""

    def __init__(self, directory: Path, *, keep_every_versions: int = 0) -> None:
        """Open or make the directory; keep the masters of every such multiple of versions, 0: of none."""
        self._directory = directory
        self._keep_every_versions = keep_every_versions
        durable.make_directory(directory)
        for left_over in directory.glob(f"{_STAGED}*"):
            shutil.rmtree(left_over)

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Make ``progress.version`` the newest checkpoint; durable on return.

        Raises:
            OSError: the disk is full or failing; earlier checkpoints are untouched, and nothing is left of
                this one.
        """
        name = _name(progress.version)
        staged = self._directory / f"{_STAGED}{name}"
        shutil.rmtree(staged, ignore_errors=True)
        is_staged = False
        try:
            self._stage(staged, policy, optimizer, progress)
            is_staged = True
            durable.rename(staged, self._directory / name)
        except BaseException:
            if is_staged and not staged.exists():
                # The sync after the rename failed: remove the directory under a name that is no checkpoint's.
                (self._directory / name).rename(staged)
            shutil.rmtree(staged, ignore_errors=True)
            raise
        names = _names(self._directory)
        recent = self._recent(names, progress)
        for old in names[:-_KEPT]:
            if old in recent or self._is_kept(int(old), progress):
                (self._directory / old / _OPTIMIZER).unlink(missing_ok=True)
            else:
                shutil.rmtree(self._directory / old, ignore_errors=True)

    def amend(self, progress: Progress) -> None:
        """Replace the progress in the newest checkpoint, which is of the same version; durable on return.

        Raises:
            OSError: the disk is full or failing; the checkpoint is untouched.
            StartupError: the checkpoint was damaged since it was written.
        """
        path = self._directory / _name(progress.version)
        saved = dataclasses.replace(_saved_in(path), progress=progress)
        durable.write(path / _PROGRESS, _as_json(saved))

    def _recent(self, names: Sequence[str], progress: Progress) -> Sequence[str]:
        """Return the newest versions, among them any that is evaluated unbeknown to the learner."""
        if not progress.is_evaluated:
            return names[-_KEPT:]
        since_versions = [progress.announced_version - _BEFORE_ANNOUNCED]
        if progress.evaluating_version is not None:
            since_versions.append(progress.evaluating_version)
        since = _name(max(0, min(since_versions)))
        size_bytes = (self._directory / names[-1] / _MODEL).stat().st_size
        further = min(_FURTHER_KEPT, _FURTHER_KEPT_BYTES // size_bytes)
        return [name for name in names[-_KEPT_WHILE_EVALUATED - further :] if name >= since]

    def _is_kept(self, version: int, progress: Progress) -> bool:
        if self._keep_every_versions and version % self._keep_every_versions == 0:
            return True
        return version in (progress.best and progress.best.version, progress.evaluating_version)

    def _stage(
        self, staged: Path, policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress
    ) -> None:
        staged.mkdir()
        tensors = {
            _MODEL: {name: tensor.detach().contiguous() for name, tensor in policy.tensors.items()},
            _OPTIMIZER: _moments(policy, optimizer),
        }
        for file_name, content in tensors.items():
            with _as_os_error():
                save_file(content, staged / file_name)
        digests = {file_name: _blake3(staged / file_name) for file_name in tensors}
        saved = _Saved(policy.layout.digest.hex(), digests, progress)
        (staged / _PROGRESS).write_bytes(_as_json(saved))
        for path in (*staged.iterdir(), staged):
            durable.sync(path)

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer) -> Progress:
        """Load the newest checkpoint into policy and optimizer; without one, leave them at version 0.

        Raises:
            StartupError: the newest checkpoint is damaged or of another model.
        """
        names = _names(self._directory)
        if not names:
            return Progress(version=0)
        path = self._directory / names[-1]
        progress = _verified(path, policy.layout, {name: path / name for name in (_MODEL, _OPTIMIZER)})
        masters = load_file(path / _MODEL)
        with torch.no_grad():
            for name, tensor in policy.tensors.items():
                tensor.copy_(masters[name])
        _restore_moments(policy, optimizer, load_file(path / _OPTIMIZER))
        return progress


def versions_in(directory: Path) -> list[int]:
    """Return the versions with a checkpoint in a directory that a learner may be writing to, ascending."""
    return [int(name) for name in _names(directory)] if directory.is_dir() else []


def best_in(directory: Path) -> BestVersion | None:
    """Return the best version that the newest checkpoint knows of.

    Raises:
        StartupError: the newest checkpoint is damaged, or there is none.
    """
    return _saved_in(directory / _names(directory)[-1]).progress.best


def read_masters(directory: Path, version: int, *, layout: Layout) -> dict[str, Tensor]:
    """Return the float32 masters of a version, by name; the learner may remove it meanwhile.

    Raises:
        CheckpointGoneError: the learner has removed it already.
        StartupError: the checkpoint is damaged or of another model.
    """
    path = directory / _name(version)
    newest = versions_in(directory)[-1:]
    try:
        with (path / _MODEL).open("rb") as file:  # what is open stays readable when its name is removed
            opened = Path(f"/dev/fd/{file.fileno()}")
            _verified(path, layout, {_MODEL: opened})
            return load_file(opened)
    except (OSError, StartupError) as error:
        is_missing = isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)
        if is_missing and (not path.exists() or versions_in(directory)[-1:] != newest):
            raise CheckpointGoneError(
                f"version {version} was removed while it was being read: the learner has made newer ones",
                fix="Export the newest, or set learner.keep_every_versions to keep more of them.",
            ) from error
        if isinstance(error, StartupError):
            raise
        raise _damaged(path, str(error)) from error


def _name(version: int) -> str:
    return f"{version:012d}"


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.isdecimal())


def _moments(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": value.detach().contiguous()
        for name, parameter in policy.parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _restore_moments(policy: Policy, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    optimizer.state.clear()
    for key_and_name, value in moments.items():
        key, _, name = key_and_name.partition("/")
        # AdamW keeps its step count on the CPU or beside the parameter; it takes both.
        optimizer.state[policy.tensors[name]][key] = value.to(policy.device)


def _as_json(saved: _Saved) -> bytes:
    return json.dumps(dataclasses.asdict(saved)).encode()


def _saved_in(path: Path) -> _Saved:
    try:
        return _SAVED.validate_json((path / _PROGRESS).read_bytes())
    except (OSError, ValidationError) as error:
        raise _damaged(path, str(error)) from error


def _verified(path: Path, layout: Layout, files: Mapping[str, Path]) -> Progress:
    """Check what a checkpoint says of itself, and these of its files, by name."""
    saved = _saved_in(path)
    try:
        damaged = [name for name, file in files.items() if _blake3(file) != saved.file_digests.get(name)]
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if saved.progress.version != int(path.name):
        raise _damaged(path, f"{_PROGRESS} says it is version {saved.progress.version}")
    if saved.layout_digest != layout.digest.hex():
        raise StartupError(
            f"checkpoint {path} is of another model than learner.model_dir",
            fix="Point learner.model_dir at the model the run began with, or node.state_dir elsewhere",
        )
    if damaged:
        raise _damaged(path, f"{damaged[0]} does not have its digest")
    return saved.progress


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn a safetensors error of a write into the OSError behind it."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _blake3(path: Path) -> str:
    return blake3.blake3().update_mmap(path).hexdigest()


def _damaged(path: Path, what: str) -> StartupError:
    return StartupError(
        f"checkpoint {path} is damaged: {what}",
        fix="Restore the directory from a copy. Do not go back to an older checkpoint, whose next version "
        "number is in use already; begin a new run with it instead",
    )
