"""The layout of a model: the canonical order of its words, and how they are cut into frames.

A version is one flat array of words: all tensors, row-major, ordered by dtype with the widest elements
first, then by the bytes of their names. So elements are aligned, and a frame has one dtype. Single-byte
elements share a word by two, and the last word of a tensor may be half empty.

A frame is coded, hashed, fetched and repaired alone: a number of words of one dtype, wherever tensors
begin and end. Both sides derive the layout from their copy of the model. Only its digest is sent.

    tensors   a [40] b [10] c [7]     d [100]            frame_words = 50
    frames    |---- 50 ----|---- 50 ----|---- 50 ----|- 7 -|
"""

import bisect
import itertools
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import blake3

from node.errors import Reason, RefusedError
from node.values import limits
from node.values.policy import BASE_PART_BYTES, BASE_PARTS, BaseModel
from node.weights.format.digests import LAYOUT_DIGEST_BYTES, version_root
from node.weights.format.dtypes import BFLOAT16, DTYPES, Dtype

TENSOR_NAME_BYTES: Final = 1024

_LAYER: Final = re.compile(r"\.(\d+)\.")
_EMBEDDING: Final = re.compile(r"embed_tokens|wte|embed_in|word_embeddings")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str = BFLOAT16.name


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor lies: in ``words[start_word : start_word + words]``, taken as its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    start_word: int
    words: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FrameSpan:
    start_word: int
    words: int
    dtype: Dtype = BFLOAT16

    @property
    def slice(self) -> slice:
        return slice(self.start_word, self.start_word + self.words)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The words that a frame and a tensor have in common."""

    tensor: TensorSpan
    tensor_word: int
    """Where they start, counted from the start of the tensor."""
    frame_word: int
    """And from the start of the frame."""
    words: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Every tensor and every frame of a model, in canonical order."""

    tensors: tuple[TensorSpan, ...]
    frames: tuple[FrameSpan, ...]
    words: int
    """Words of the whole version."""
    digest: bytes
    """LAYOUT_DIGEST_BYTES bytes over names, dtypes, shapes and the frame size."""

    @property
    def summary(self) -> str:
        """Return a summary for people to compare when two digests differ, at most about 150 characters."""
        numbers = [int(number[1]) for span in self.tensors if (number := _LAYER.search(span.name))]
        embeddings = [span.shape[0] for span in self.tensors if _EMBEDDING.search(span.name) and span.shape]
        dtypes = sorted({span.dtype.name for span in self.tensors})
        return (
            f"layers {max(numbers, default=-1) + 1}, vocabulary {max(embeddings, default=0)}, "
            f"parameters {sum(span.elements for span in self.tensors)}, tensors {len(self.tensors)}, "
            f"dtypes {' '.join(dtypes)}"
        )

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], *, frame_words: int = limits.FRAME_WORDS) -> "Layout":
        """Return the layout of ``specs``, given in any order.

        Raises RefusedError: LAYOUT_MISMATCH: a dtype cannot be coded; MALFORMED: a name or shape breaks a
        rule, or a name comes twice; OVER_LIMIT: too many frames, or frames too large, or too small for an
        element.
        """
        if not 1 <= frame_words <= limits.FRAME_WORDS:
            raise RefusedError(
                Reason.OVER_LIMIT, f"frames have {frame_words} words, 1 to {limits.FRAME_WORDS} allowed"
            )
        by_name = sorted(specs, key=lambda spec: spec.name.encode())
        for spec, previous in zip(by_name, [None, *by_name], strict=False):
            _check(spec, previous=previous, frame_words=frame_words)
        tensors: list[TensorSpan] = []
        start = 0
        for spec in sorted(by_name, key=lambda spec: (-DTYPES[spec.dtype].element_bytes, spec.dtype)):
            dtype = DTYPES[spec.dtype]
            words = dtype.words(math.prod(spec.shape))
            tensors.append(TensorSpan(spec.name, spec.shape, dtype, start, words))
            start += words
        if not tensors:
            raise RefusedError(Reason.MALFORMED, "the model has no tensors")
        # The widest elements fill a frame least, and the last frame of each dtype may have few.
        if start > (limits.FRAMES_PER_ARTIFACT - len(DTYPES)) * _cut_words(frame_words, tensors[0].dtype):
            raise RefusedError(
                Reason.OVER_LIMIT, f"the model has too many frames: {start} words in frames of {frame_words}"
            )
        frames = [
            frame
            for dtype, group in itertools.groupby(tensors, key=lambda span: span.dtype)
            for frame in _cut(tuple(group), _cut_words(frame_words, dtype), dtype)
        ]
        return cls(tuple(tensors), tuple(frames), start, _digest(tensors, frame_words))

    def tensor_at(self, word: int) -> TensorSpan:
        return self.tensors[self._tensor_number_at(word)]

    def base_model(self, frame_digests: Sequence[int]) -> BaseModel:
        """Return version 0 as peers tell of it, from the words digests of its frames."""
        parts = min(BASE_PARTS, len(self.frames))
        starts = [part * len(self.frames) // parts for part in range(parts + 1)]
        runs = (frame_digests[start:end] for start, end in itertools.pairwise(starts))
        return BaseModel(
            version_root(self.digest, frame_digests),
            b"".join(version_root(b"", run)[:BASE_PART_BYTES] for run in runs),
            tuple(self.tensor_at(self.frames[start].start_word).name for start in starts[:-1]),
        )

    def overlaps(self, frame: int) -> Iterator[Overlap]:
        """Yield the parts of tensors that make up a frame, in order."""
        span = self.frames[frame]
        end = span.start_word + span.words
        for number in range(self._tensor_number_at(span.start_word), len(self.tensors)):
            tensor = self.tensors[number]
            if tensor.start_word >= end:
                return
            start = max(tensor.start_word, span.start_word)
            words = min(tensor.start_word + tensor.words, end) - start
            yield Overlap(tensor, start - tensor.start_word, start - span.start_word, words)

    def _tensor_number_at(self, word: int) -> int:
        return bisect.bisect_right(self.tensors, word, key=lambda span: span.start_word) - 1


def _cut_words(frame_words: int, dtype: Dtype) -> int:
    """Return the most words, up to ``frame_words``, that hold whole elements."""
    return frame_words // dtype.unit_words * dtype.unit_words


def _check(spec: TensorSpec, *, previous: TensorSpec | None, frame_words: int) -> None:
    if spec.dtype not in DTYPES:
        raise RefusedError(
            Reason.LAYOUT_MISMATCH,
            f"tensor {spec.name!r} is {spec.dtype}; only these can be published: {', '.join(DTYPES)}",
            fix="convert the model before the run",
        )
    if not 1 <= len(spec.name.encode()) <= TENSOR_NAME_BYTES or "\0" in spec.name:
        raise RefusedError(Reason.MALFORMED, f"{spec.name[:64]!r} is not a valid name of a tensor")
    if previous is not None and spec.name == previous.name:
        raise RefusedError(Reason.MALFORMED, f"tensor {spec.name!r} comes twice")
    if any(length < 1 for length in spec.shape):
        raise RefusedError(Reason.MALFORMED, f"tensor {spec.name!r} has shape {spec.shape}")
    if DTYPES[spec.dtype].unit_words > frame_words:
        raise RefusedError(
            Reason.OVER_LIMIT, f"an element of {spec.name!r} does not fit a frame of {frame_words} words"
        )


def _cut(tensors: Sequence[TensorSpan], frame_words: int, dtype: Dtype) -> Iterator[FrameSpan]:
    end = tensors[-1].start_word + tensors[-1].words
    for start in range(tensors[0].start_word, end, frame_words):
        yield FrameSpan(start, min(frame_words, end - start), dtype)


def _digest(tensors: Iterable[TensorSpan], frame_words: int) -> bytes:
    hasher = blake3.blake3(b"heterorl-layout-v1\0" + struct.pack("<I", frame_words))
    for tensor in tensors:
        for text in (tensor.name.encode(), tensor.dtype.name.encode()):
            hasher.update(struct.pack("<I", len(text)) + text)
        hasher.update(struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
    return hasher.digest(length=LAYOUT_DIGEST_BYTES)
