"""The words of an earlier version as masters, for a rollback or to score with.

    published words, a checkpoint's rounded masters, the base model --frames--> <state>/rollback-staged/*
    published words, the base model ---------------------------------frames--> tensors in memory

The masters are the words themselves, so the next publication has the version's root. A frame, the tensors
that it begins or ends, and ``BATCH_BYTES`` of whole tensors that are written together are in memory.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from learner.journal.checkpoint import opened_masters
from learner.journal.checkpoint_index import CHECKPOINTS
from learner.masters.file_words import FileWords
from learner.operator_orders import VersionGoneError
from learner.publishing.kept_versions import PublishedWords, opened_published, published_versions
from node.errors import RefusedError, StartupError
from node.weights.assembly.encode import FrameWords
from node.weights.assembly.public_base import PublicBase
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout, TensorSpan

STAGED: Final = "rollback-staged"
"""Directory of a learner's state, which is there during a rollback."""

BATCH_BYTES: Final = 1 << 28


class EarlierVersions:
    """Stages versions that a learner's state directory has. Blocking; one at a time."""

    def __init__(self, state: Path, base: PublicBase, layout: Layout) -> None:
        self._state = state
        self._base = base
        self._layout = layout
        self.clear()

    def stage(self, version: int) -> Path:
        """Write a version's masters; return their directory. ``clear`` must follow.

        Raises:
            VersionGoneError: it is not there, it is damaged, or the disk is full.
        """
        directory = self._state / STAGED
        try:
            directory.mkdir()
            with self._opened(version) as (words_of, root):
                self._write(words_of, root, directory)
        except (OSError, RefusedError, StartupError, ValueError) as error:
            self.clear()
            raise VersionGoneError(str(error)) from error
        return directory

    def read(self, version: int) -> dict[str, Tensor]:
        """Return a version's masters by name, on the CPU, made of its published words.

        Raises:
            VersionGoneError: its words are not there any more, or damaged.
        """
        try:
            with self._published(version) as published:
                if published is None:
                    raise VersionGoneError(f"the words of version {version} are not here any more")
                digests: list[int] = []
                tensors = dict(self._tensors(published.frame, digests))
                self._check_root(digests, published.root)
        except (OSError, RefusedError, ValueError) as error:
            raise VersionGoneError(str(error)) from error
        return tensors

    def published(self) -> list[int]:
        """Return the versions that ``read`` may find, ascending."""
        return [self._base.version.number, *published_versions(self._state)]

    def clear(self) -> None:
        """Remove what is staged."""
        shutil.rmtree(self._state / STAGED, ignore_errors=True)

    @contextmanager
    def _opened(self, version: int) -> Iterator[tuple[FrameWords, bytes | None]]:
        """Yield the words of a version, and the root that they must have; None: it is not known."""
        with self._published(version) as published:
            if published is not None:
                yield published.frame, published.root
                return
        with opened_masters(self._state / CHECKPOINTS, version, layout=self._layout) as masters:
            yield FileWords(masters, self._layout).frame, None

    @contextmanager
    def _published(self, version: int) -> Iterator[PublishedWords | None]:
        def base(frame: int) -> Words:
            return self._base.words[self._layout.frames[frame].slice]

        if version == self._base.version.number:
            yield PublishedWords(base, self._base.version.root)
            return
        with opened_published(self._state, version, layout=self._layout, base=base) as published:
            yield published

    def _write(self, words_of: FrameWords, root: bytes | None, directory: Path) -> None:
        digests: list[int] = []
        batch, batch_bytes, files = dict[str, Tensor](), 0, 0
        for name, tensor in self._tensors(words_of, digests):
            batch[name] = tensor
            batch_bytes += tensor.nbytes
            if batch_bytes >= BATCH_BYTES:
                save_file(batch, directory / f"{files:06d}.safetensors")
                batch, batch_bytes, files = {}, 0, files + 1
        if batch:
            save_file(batch, directory / f"{files:06d}.safetensors")
        if root is not None:
            self._check_root(digests, root)

    def _check_root(self, digests: Sequence[int], root: bytes) -> None:
        if version_root(self._layout.digest, digests) != root:
            raise ValueError(f"its words do not have root {root.hex()}")

    def _tensors(self, words_of: FrameWords, digests: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, floats as float32; add the digest of every frame to ``digests``."""
        begun: dict[str, Words] = {}
        for frame in range(len(self._layout.frames)):
            words = words_of(frame)
            digests.append(words_digest(words))
            for piece in self._layout.overlaps(frame):
                span = piece.tensor
                whole = begun.setdefault(span.name, np.empty(span.words, np.uint16))
                end = piece.tensor_word + piece.words
                whole[piece.tensor_word : end] = words[piece.frame_word :][: piece.words]
                if end == span.words:
                    yield span.name, _tensor(begun.pop(span.name), span)


def _tensor(words: Words, span: TensorSpan) -> Tensor:
    elements = torch.from_numpy(words).view(getattr(torch, span.dtype.name))[: span.elements]
    shaped = elements.view(span.shape)
    return shaped.float() if span.dtype.is_floating else shaped.clone()
