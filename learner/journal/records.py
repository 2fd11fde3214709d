"""The bytes of a journal: segments of records, each of which proves which one it follows; pure.

    segment   record of a header | record of an entry*
    record    magic | check 8 | text bytes u32 | blob bytes u64 | digest before 16 | digest 16 | text | blob
    text      JSON: of the header, or {"step": ...}, {"news": ...}
    blob      of a step: random state | for each group its header | its columns

All numbers are little-endian. The digest is BLAKE3 over the digest of the record before, text and blob; the
header of a segment has the digest of the last record of the segment before. So a record that is changed,
missing, moved or of another journal is noticed. The check is BLAKE3 over the header's digest and the rest of
the record's head: it tells where records begin after one that cannot be read. Somebody who writes groups does
not know the header's salt and cannot forge it.

Bytes at the end of a segment that are no whole record, with none after them, are *torn*: the machine stopped
during the write, and nobody was told. Anything else that cannot be read is *damaged*.
"""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import blake3
from pydantic import TypeAdapter, ValidationError

from learner.journal.progress import Entry, NewsEntry, StepEntry
from node.rollout import EncodedGroup

FORMAT: Final = 1
NO_DIGEST: Final = b"\0" * 16
"""Before the first record of a run."""

_MAGIC: Final = b"\x89HRLj"
_HEAD: Final = struct.Struct("<5s 8s I Q 16s 16s")
_SIZES_AT: Final = 13
"""Where the part of a head begins that its check is of."""
_FIRST_KEY: Final = b"heterorl-journal-1"
_STEP, _NEWS = TypeAdapter(StepEntry), TypeAdapter(NewsEntry)


class DamagedJournalError(ValueError):
    """A journal, or a segment of one, is not what was written; says where."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The run and the model that a journal or a checkpoint is of."""

    run_id: str
    layout_digest: str
    """Hex, as ``base_root``."""
    base_root: str
    """Root of version 0."""

    def difference(self, other: "Origin") -> str:
        """Return in which way another one differs, for people; empty: it does not."""
        differing = [
            f"{name} is {theirs}, here it is {ours}"
            for name, ours in asdict(self).items()
            if (theirs := getattr(other, name)) != ours
        ]
        return "; ".join(differing)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's header."""

    origin: Origin
    number: int
    """Segments are numbered from 1."""
    version: int
    """The learner's before its first entry."""
    learner_epoch: int
    previous_digest: str
    """Hex, of the last record before."""
    salt: str
    """Hex, random."""
    format: int = FORMAT


_HEADER: Final = TypeAdapter(SegmentHeader)


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """An entry as it was read."""

    entry: Entry
    blob: memoryview

    @property
    def random_state(self) -> bytes:
        """torch's random state before the step, the CPU's and then CUDA's."""
        assert isinstance(self.entry, StepEntry)
        return bytes(self.blob[: self.entry.random_state_bytes])

    @property
    def groups(self) -> list[EncodedGroup]:
        """The groups of a step, in order."""
        assert isinstance(self.entry, StepEntry)
        groups, at = [], self.entry.random_state_bytes
        for header_bytes, columns_bytes in self.entry.group_bytes:
            columns_at = at + header_bytes
            at = columns_at + columns_bytes
            groups.append(
                EncodedGroup(
                    bytes(self.blob[columns_at - header_bytes : columns_at]), bytes(self.blob[columns_at:at])
                )
            )
        return groups


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as it was read."""

    header: SegmentHeader
    records: tuple[JournalRecord, ...]
    digest: bytes
    """Digest of its last record."""
    torn_bytes: int
    """At its end; see above."""

    @property
    def version(self) -> int:
        """The learner's after its last entry."""
        steps = [record.entry.version for record in self.records if isinstance(record.entry, StepEntry)]
        return steps[-1] if steps else self.header.version


def header_record(header: SegmentHeader) -> tuple[bytes, bytes]:
    """Return the record that a segment begins with, and its digest, which is the key of the others."""
    return _record(json.dumps(asdict(header)).encode(), (), previous=NO_DIGEST, key=_FIRST_KEY)


def entry_record(entry: Entry, blobs: Sequence[bytes], *, previous: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Return the record of an entry, and its digest.

    Args:
        blobs: the random state, then header and columns of each group; nothing with news.
        previous: digest of the record before.
        key: digest of the segment's header.
    """
    kind = "step" if isinstance(entry, StepEntry) else "news"
    return _record(json.dumps({kind: asdict(entry)}).encode(), blobs, previous=previous, key=key)


def read_segment(data: memoryview) -> Segment:
    """Return what a segment holds; blobs are views of ``data``.

    Raises:
        DamagedJournalError: a record is not what was written, and it is not the last one.
    """
    first = _read(data, 0, previous=NO_DIGEST, key=_FIRST_KEY)
    if first is None:
        raise DamagedJournalError("its header is not what was written there")
    text, _, digest, end = first
    try:
        header = _HEADER.validate_json(bytes(text))
    except ValidationError as error:
        raise DamagedJournalError(f"its header cannot be read: {error}") from error
    key, records = digest, list[JournalRecord]()
    while (found := _read(data, end, previous=digest, key=key)) is not None:
        text, blob, digest, end = found
        records.append(JournalRecord(_entry(bytes(text), len(blob), number=len(records) + 1), blob))
    is_elsewhere = _has_head(data, end, key=key) and _HEAD.unpack_from(data, end)[4] != digest
    if is_elsewhere or _has_record_after(data, end, key=key):
        raise DamagedJournalError(
            f"entry {len(records) + 1}, at byte {end}, is not what was written there, or does not follow on "
            "the entry before"
        )
    return Segment(header, tuple(records), digest, len(data) - end)


def _record(text: bytes, blobs: Sequence[bytes], *, previous: bytes, key: bytes) -> tuple[bytes, bytes]:
    digest = _digest(previous, text, blobs)
    sizes = _HEAD.pack(b"", b"", len(text), sum(map(len, blobs)), previous, digest)[_SIZES_AT:]
    return b"".join((_MAGIC, _check(key, sizes), sizes, text, *blobs)), digest


def _read(
    data: memoryview, at: int, *, previous: bytes, key: bytes
) -> tuple[memoryview, memoryview, bytes, int] | None:
    """Return text, blob, digest and end of the record at ``at``; None: there is none that is whole."""
    if not _has_head(data, at, key=key):
        return None
    _, _, text_bytes, blob_bytes, _, digest = _HEAD.unpack_from(data, at)
    text_at = at + _HEAD.size
    end = text_at + text_bytes + blob_bytes
    text, blob = data[text_at : text_at + text_bytes], data[text_at + text_bytes : end]
    if end > len(data) or _digest(previous, bytes(text), (blob,)) != digest:
        return None
    return text, blob, digest, end


def _has_head(data: memoryview, at: int, *, key: bytes) -> bool:
    head = bytes(data[at : at + _HEAD.size])
    return len(head) == _HEAD.size and head[:_SIZES_AT] == _MAGIC + _check(key, head[_SIZES_AT:])


def _has_record_after(data: memoryview, at: int, *, key: bytes) -> bool:
    """Whether a record begins somewhere after ``at``."""
    starts = (match.start() for match in re.finditer(re.escape(_MAGIC), data[at + 1 :]))
    return any(_has_head(data, at + 1 + start, key=key) for start in starts)


def _digest(previous: bytes, text: bytes, blobs: Sequence[bytes | memoryview]) -> bytes:
    hasher = blake3.blake3(previous + text)
    for blob in blobs:
        hasher.update(blob)
    return hasher.digest(length=16)


def _check(key: bytes, sizes: bytes) -> bytes:
    return blake3.blake3(key + sizes).digest(length=8)


def _entry(text: bytes, blob_bytes: int, *, number: int) -> Entry:
    try:
        # json's own reader: pydantic's takes no NaN, which an effective sample size may be.
        document = json.loads(text)
        if "news" in document:
            return _NEWS.validate_python(document["news"])
        entry = _STEP.validate_python(document["step"])
    except (ValueError, KeyError) as error:
        raise DamagedJournalError(f"entry {number} cannot be read: {error}") from error
    if not 0 <= entry.cuda_state_bytes <= entry.random_state_bytes:
        raise DamagedJournalError(
            f"entry {number} has a random state of {entry.random_state_bytes} bytes, "
            f"{entry.cuda_state_bytes} of them CUDA's"
        )
    if entry.random_state_bytes + sum(map(sum, entry.group_bytes)) != blob_bytes:
        raise DamagedJournalError(
            f"entry {number} has a blob of {blob_bytes} bytes, which are not its groups"
        )
    return entry
