"""What became of a frame on the rank that has it, as it is told to the first rank."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from node.errors import Reason, RefusedError
from node.weights.assembly.encode import CodedFrame
from node.weights.assembly.merge import MergedFrame
from node.weights.format.digests import PAYLOAD_DIGEST_BYTES, Words, words_check, words_digest
from node.weights.format.manifest import Codec, FrameRecord

_HEADER: Final = struct.Struct(f"<?BII{PAYLOAD_DIGEST_BYTES}sQQ")
_NO_DIGEST: Final = bytes(PAYLOAD_DIGEST_BYTES)

HEADER_BYTES: Final = _HEADER.size


@dataclass(frozen=True, slots=True, eq=False)
class FrameResult:
    """A frame that was coded, copied or only hashed."""

    coded: CodedFrame
    payload: bytes = b""
    base_digest: int = 0
    """Of the old words, where it was coded against some."""
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
