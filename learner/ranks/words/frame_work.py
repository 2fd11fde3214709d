"""Work of a rank on its own frames, in threads of its own.

    work       with the masters' words of a frame     or with the published ones
    digest     hash them                              keyframe   code them alone
    copy       hand them over                         merge      code them against an older version's
    code       code them against the published ones
    rebuild    make an older version's in their place

Whatever is refused becomes the frame's result. Other ranks tell the first one results as header and payload.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from learner.masters.version_coder import OwnFrames
from learner.ranks.words.dealt_words import DealtWords
from node.errors import Reason, RefusedError
from node.weights.assembly.encode import CodedFrame, code_frame
from node.weights.assembly.merge import MergedFrame, merge_frame
from node.weights.assembly.stored import rebuild_frame
from node.weights.format.digests import PAYLOAD_DIGEST_BYTES, Words, words_check, words_digest
from node.weights.format.manifest import Codec, FrameRecord, Manifest

ROUND_FRAMES: Final = 4
"""Frames of each rank in a round. One round's are coded while the next one's words travel."""

_OF_MASTERS: Final = ("digest", "copy", "code")
OF_STORE: Final = ("merge", "rebuild")
"""Work that takes the way to an old version."""


_HEADER: Final = struct.Struct(f"<?BII{PAYLOAD_DIGEST_BYTES}sQQ")
_NO_DIGEST: Final = bytes(PAYLOAD_DIGEST_BYTES)

HEADER_BYTES: Final = _HEADER.size


@dataclass(frozen=True, slots=True)
class Steps:
    """The way to a frame of an older version."""

    start: Words | None
    """Its words where the artifacts start from; None: the first one is a keyframe."""
    payloads: Sequence[bytes]
    """Its payload in each of them."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameResult:
    """A frame that was coded, copied or only hashed."""

    coded: CodedFrame
    payload: bytes = b""
    base_digest: int = 0
    """Digest of the old words, where it was coded against some."""
    is_refused: bool = False
    """The payload says why."""

    @classmethod
    def of_words(cls, words: Words, *, is_copied: bool) -> Self:
        """Return a frame's digest, and its words as the payload or nothing."""
        payload, digest = words.tobytes() if is_copied else b"", words_digest(words)
        record = FrameRecord(Codec.RAW, len(payload), words_check(digest), _NO_DIGEST)
        return cls(CodedFrame(record, digest), payload)

    @classmethod
    def of_refusal(cls, error: RefusedError) -> Self:
        """Return that nothing became of it, and why."""
        payload = json.dumps([error.reason.name, error.what, error.fix]).encode()
        record = FrameRecord(Codec.RAW, len(payload), 0, _NO_DIGEST)
        return cls(CodedFrame(record, 0), payload, is_refused=True)

    @property
    def merged(self) -> MergedFrame:
        """The frame as part of a delta over many versions."""
        return MergedFrame(self.coded, self.base_digest)

    def raise_refusal(self) -> None:
        """Raise why nothing became of it, if so.

        Raises:
            RefusedError: as the rank that has the frame raised it.
        """
        if self.is_refused:
            reason, what, fix = json.loads(self.payload)
            raise RefusedError(Reason[reason], what, fix=fix)

    def without_payload(self) -> Self:
        """Return what a manifest needs of it."""
        return type(self)(self.coded, base_digest=self.base_digest)

    def header(self) -> bytes:
        """Return all but the payload, encoded."""
        record = self.coded.record
        return _HEADER.pack(
            self.is_refused,
            record.codec,
            record.payload_bytes,
            record.new_check,
            record.payload_digest,
            self.coded.digest,
            self.base_digest,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Some frames of every rank, and this rank's, under way."""

    frames: Sequence[int] = ()
    own: Sequence[tuple[int, Future[FrameResult]]] = ()

    def wait(self) -> None:
        """Wait until no thread is at work for it."""
        wait([future for _, future in self.own])

    def results(self) -> list[FrameResult]:
        """Wait for the results of this rank's frames."""
        return [future.result() for _, future in self.own]


class FrameWork:
    """The frames of this rank, and what is done to them."""

    def __init__(self, masters: DealtWords, *, threads: int) -> None:
        """Work on frames of what ``masters`` reads.

        Args:
            threads: that share the work, at least 1.
        """
        self.layout, self.rank, self.owner = masters.layout, masters.rank, masters.owner
        self.words = OwnFrames(masters.layout, masters.own(range(len(masters.layout.frames))))
        """This rank's, published and being made."""
        self._masters = masters
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="coding")

    def rounds(self, work: str) -> list[list[int]]:
        """Return the frames of each round, the same on all ranks.

        What is copied goes one by one and in order. The way to an old version comes from the first rank, in
        whose memory it is for one frame of each rank.
        """
        if work == "copy":
            return [[frame] for frame in range(len(self.layout.frames))]
        return self._masters.rounds(1 if work in OF_STORE else ROUND_FRAMES)

    def own(self, frames: Sequence[int], *, rank: int | None = None) -> list[int]:
        """Return which of some frames are this rank's, or another's."""
        return self._masters.own(frames, rank=rank)

    def begin(
        self, work: str, frames: Sequence[int], manifests: Sequence[Manifest], steps: Mapping[int, Steps]
    ) -> Round:
        """Begin a round, together with the other ranks.

        Args:
            manifests: that lead to an older version.
            steps: the way there of each of this rank's frames.
        """
        if work in _OF_MASTERS:
            self._masters.fill(frames, self.words.made)
        begun = [
            (frame, self._pool.submit(self._outcome, work, frame, manifests, steps.get(frame)))
            for frame in self.own(frames)
        ]
        return Round(frames, begun)

    def close(self) -> None:
        """Begin nothing any more."""
        self._pool.shutdown(wait=False)

    def _outcome(
        self, work: str, frame: int, manifests: Sequence[Manifest], steps: Steps | None
    ) -> FrameResult:
        try:
            old = None if steps is None else self._old(frame, manifests, steps)
            return self._result(work, frame, old)
        except RefusedError as refused:
            return FrameResult.of_refusal(refused)

    def _result(self, work: str, frame: int, old: Words | None) -> FrameResult:
        words, layout = self.words, self.layout
        if work == "code":
            base = words.published if words.has_published else None
            return FrameResult(*code_frame(frame, new=words.made, base=base, layout=layout))
        if work == "keyframe":
            return FrameResult(*code_frame(frame, new=words.published, base=None, layout=layout))
        if work == "merge" and old is not None:
            merged, payload = merge_frame(frame, new=words.published(frame), old=old, layout=layout)
            return FrameResult(merged.coded, payload, merged.base_digest)
        made = words.made(frame)
        if old is not None:
            np.copyto(made, old)
        return FrameResult.of_words(made, is_copied=work == "copy")

    def _old(self, frame: int, manifests: Sequence[Manifest], steps: Steps) -> Words:
        way = list(zip(manifests, steps.payloads, strict=True))
        return rebuild_frame(frame, way, layout=self.layout, start=steps.start)


def payload_sizes(headers: bytes) -> list[int]:
    """Return the sizes of the payloads that belong to these headers."""
    return [fields[2] for fields in _HEADER.iter_unpack(headers)]


def results_of(headers: bytes, payloads: Sequence[bytes]) -> list[FrameResult]:
    """Return results from their headers, one after the other, and their payloads."""
    return [
        FrameResult(
            CodedFrame(FrameRecord(Codec(codec), size, check, payload_digest), digest),
            payload,
            base_digest,
            is_refused,
        )
        for (is_refused, codec, size, check, payload_digest, digest, base_digest), payload in zip(
            _HEADER.iter_unpack(headers), payloads, strict=True
        )
    ]
