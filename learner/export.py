"""A version as a model directory, with the base model's names and files, for ``heterorl-node export``.

    published words, from the learner's store -------------.
    a checkpoint's float32 masters, rounded ------------------'--frames--> a copy of the base model's files

The export is what samplers compute with: it is read back before it gets its name, and must have the
root that the learner signs. Names, tied weights, tokenizer, chat template and generation settings are
the base model's. A few tensors are in memory at a time, but for families whose tensors transformers renames.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.journal.checkpoint import CheckpointGoneError, opened_masters
from learner.journal.checkpoint_index import CHECKPOINTS, progress_in
from learner.journal.progress import BestVersion
from learner.masters.file_words import FileWords
from learner.masters.master_words import MasterWords, root_of
from learner.model.model import Policy, load_policy, model_errors_explained
from learner.model.sliced_loading import EmptyModel
from learner.publishing.available_versions import available_versions, check_available, listed
from learner.publishing.kept_versions import opened_published
from learner.publishing.model_copy import ModelCopy
from node.errors import RefusedError, StartupError
from node.weights.assembly.encode import FrameWords
from node.weights.assembly.public_base import TakeWords
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.model_files import StoredDtypes

READS: Final = 10
"""Tries to read a version before the learner removes it."""

_WEIGHT_FILES: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
"""Files of other values than the export has; all others are copied from the base model."""


_CHAT_TEMPLATES: Final = "additional_chat_templates"
"""Directory where transformers keeps the templates that have names."""


@dataclass(frozen=True, slots=True)
class Export:
    """Result of an export."""

    directory: str
    version: int
    root: str
    """Hex; as in the signed manifest and in ``heterorl-node status``."""
    files: tuple[str, ...]


def best_in(state: Path) -> BestVersion | None:
    """Return the best version that a learner has written down, from its state directory.

    Raises:
        StartupError: checkpoint or journal are damaged.
    """
    for _ in range(READS - 1):
        with suppress(OSError):
            return progress_in(state).best
    return progress_in(state).best


def export_version(directory: Path, *, state: Path, model_dir: Path, version: int | None) -> Export:
    """Write a version into ``directory``, which appears only when it is whole.

    Args:
        state: the learner's state directory; the learner may be running.
        version: None: the newest.
    Raises:
        StartupError: the version is not there, a file is damaged, or the directory cannot be written.
    """
    if directory.exists():
        raise StartupError(f"{directory} is there already", fix="Name a directory that does not exist yet.")
    _chosen(state, version)
    with _staged(directory) as staged:
        with _opened(model_dir, staged) as model:

            def take(frame: int, words: Words) -> None:
                try:
                    model.take(frame, words)
                except OSError as error:  # here: where words are read, it means that the version is gone
                    raise _unwritable(directory, error) from error

            version, root = _write(model, take, state, version)
        _copy_other_files(model_dir, staged)
        if _read_back(staged) != (model.layout.digest, root):
            raise StartupError(
                f"version {version} as written to {directory} is not what samplers compute with",
                fix="Report this with the model's config.json: transformers renames its tensors.",
            )
    files = tuple(sorted(path.name for path in directory.iterdir()))
    return Export(str(directory), version, root.hex(), files)


@contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """Yield a directory that gets its name after the body."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise StartupError(
            f"{directory} cannot be made: {error.strerror}", fix="Choose another place."
        ) from error
    try:
        yield staged
        staged.chmod(0o755)
        staged.rename(directory)
    except OSError as error:
        raise _unwritable(directory, error) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _unwritable(directory: Path, error: OSError) -> StartupError:
    return StartupError(
        f"{directory} cannot be written: {error.strerror}", fix="Make room, or choose another place."
    )


def best_version(state: Path) -> int:
    """Return the best version, whose words are there. Raises StartupError: there is none."""
    available_versions(state)
    best = best_in(state)
    if best is None:
        raise StartupError(
            "no version is known to be the best yet",
            fix="Without evaluations one is after learner.stop_window_versions steps; with "
            "[coordinator.evaluation], once `heterorl-node status` says that `export --best` takes it.",
        )
    if best.version == 0:
        raise StartupError(
            "the best version so far is the base model",
            fix="It is in --model-dir. Where `heterorl-node status` names another one, wait until it says "
            "that `export --best` takes it: within a heartbeat and a step.",
        )
    if best.version not in (there := available_versions(state)):
        raise StartupError(
            f"the words of the best version, {best.version}, are gone: it was told of too late, or another "
            f"was the best before; there are {listed(there)}",
            fix="Export one of these with --version; learner.keep_every_versions keeps more of them.",
        )
    return best.version


def _chosen(state: Path, version: int | None) -> int:
    if version is None:
        return available_versions(state)[-1]
    check_available(state, version)
    return version


@contextmanager
def _opened(model_dir: Path, staged: Path) -> Iterator["ModelCopy | _WholeModel"]:
    """Yield what takes the words of a version into a directory: frame by frame where that can be."""
    with model_errors_explained(model_dir, device="cpu"):
        empty = EmptyModel.of(model_dir)
    if empty is not None:
        base = FileWords(model_dir, empty.layout, names=empty.names).frame
        with ModelCopy.opened(
            model_dir, staged, layout=empty.layout, names=empty.canonical, base=base
        ) as model_copy:
            if model_copy is not None:
                yield model_copy
                return
    whole = _WholeModel(model_dir)
    yield whole
    whole.save(staged)


class _WholeModel:
    """A model of a family whose tensors transformers renames or joins: all of it is in memory."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._policy = load_policy(model_dir, device="cpu")
        self.layout: Final = self._policy.layout
        self._words: Words = np.empty(self.layout.words, np.uint16)
        self.base: Final = MasterWords(self._policy.tensors, self.layout).frame

    def take(self, frame: int, words: Words) -> None:
        """Take the words of a frame."""
        self._words[self.layout.frames[frame].slice] = words

    def save(self, directory: Path) -> None:
        """Write model and configuration.

        Raises:
            OSError: the disk is full or failing.
        """
        _take_words(self._policy, self._words)
        model = self._policy.model
        dtypes = {span.name: getattr(torch, span.dtype.name) for span in self.layout.tensors}
        _round(model, dtypes, self._policy.tensors)
        model.config.dtype = getattr(torch, StoredDtypes.of(self._model_dir).most)
        model.save_pretrained(directory)


def _write(
    model: ModelCopy | _WholeModel, take: TakeWords, state: Path, wanted: int | None
) -> tuple[int, bytes]:
    """Write a version, by default the newest there is by then, from under a learner that goes on.

    Returns:
        Its number and its root.
    """
    for left in reversed(range(READS)):
        version = _chosen(state, wanted)
        try:
            return version, _write_from(model, take, state, version)
        except (OSError, CheckpointGoneError):
            if not left:
                raise
        except (RefusedError, ValueError) as error:
            raise StartupError(
                f"version {version} in {state} cannot be read: {error}",
                fix="Export another version with --version, and --model-dir as the run began with.",
            ) from error
    raise AssertionError("the last read returns or raises")


def _write_from(model: ModelCopy | _WholeModel, take: TakeWords, state: Path, version: int) -> bytes:
    """Write a version from where it is; return its root."""
    layout = model.layout
    with opened_published(state, version, layout=layout, base=model.base) as published:
        if published is None:
            with opened_masters(state / CHECKPOINTS, version, layout=layout) as masters:
                return _write_frames(layout, FileWords(masters, layout).frame, take)
        root = _write_frames(layout, published.frame, take)
        if root != published.root:
            raise ValueError(f"its words do not have root {published.root.hex()}")
        return root


def _write_frames(layout: Layout, words_of: FrameWords, take: TakeWords) -> bytes:
    """Write all frames; return the root that they have."""
    digests = []
    for frame in range(len(layout.frames)):
        words = words_of(frame)
        digests.append(words_digest(words))
        take(frame, words)
    return version_root(layout.digest, digests)


def _read_back(directory: Path) -> tuple[bytes, bytes]:
    """Return the digest of the layout, and the root, of what transformers loads from a directory."""
    empty = EmptyModel.of(directory)
    if empty is None:
        policy = load_policy(directory, device="cpu")
        return policy.layout.digest, root_of(policy.master_words)
    layout, words = empty.layout, FileWords(directory, empty.layout, names=empty.names)
    digests = [words_digest(words.frame(frame)) for frame in range(len(layout.frames))]
    return layout.digest, version_root(layout.digest, digests)


def _copy_other_files(model_dir: Path, directory: Path) -> None:
    weights = {path.name for pattern in _WEIGHT_FILES for path in model_dir.glob(pattern)}
    written = {path.name for path in directory.glob("config.json")}
    for path in model_dir.iterdir():
        if path.is_file() and path.name not in weights | written:
            shutil.copyfile(path, directory / path.name)
        elif path.is_dir() and path.name == _CHAT_TEMPLATES:
            shutil.copytree(path, directory / path.name)


def _take_words(policy: Policy, words: Words) -> None:
    with torch.no_grad():
        for span in policy.layout.tensors:
            part = torch.from_numpy(words[span.start_word : span.start_word + span.words])
            elements = part.view(getattr(torch, span.dtype.name))[: span.elements]
            policy.tensors[span.name].copy_(elements.view(span.shape))


def _round(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], tensors: Mapping[str, Tensor]) -> None:
    """Round every tensor of the model to its published dtype; tied ones stay tied."""
    rounded = {tensor.data_ptr(): tensor.detach().to(dtypes[name]) for name, tensor in tensors.items()}
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.data_ptr() in rounded:
            tensor.data = rounded[tensor.data_ptr()]
