"""The manifest of an artifact: a small signed table of how every frame is coded and what it makes.

    signed     = manifest | Ed25519 signature over DOMAIN + manifest
    manifest   = magic | learner epoch | version | base version | published at | layout digest
                 | root | base root | frame count | length of run id | run id | frame*
    frame      = codec 4 bits, payload bytes 28 bits | check of the new words u32 | payload digest 16

All fields are little-endian and packed. No part is optional, so equal manifests are equal bytes. A frame
does not say what it starts from: the base root does for all frames, and a peer that holds that version
has compared it. A frame does not have the whole digest of what it makes either: the root is made of the
digests of all frames, and a peer compares it once the version is complete. A manifest is checked in this
order: length, signature, structure, run and, by a peer that knows the model, layout. Whether the version
is acceptable (newer than what is held, from a live learner) is decided by ``store.high_water``.
"""

import enum
import math
import re
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from node.errors import Reason, RefusedError
from node.identity.signatures import SigningKey, verify
from node.values import limits
from node.values.policy import NO_BASE, ROOT_BYTES, Artifact, ArtifactKey, PolicyVersion
from node.weights.format.digests import payload_digest, words_check
from node.weights.format.layout import Layout

DOMAIN: Final = b"heterorl-manifest-v1\0"
SIGNATURE_BYTES: Final = 64

_MAGIC: Final = b"HRLMAN1\0"
_HEADER: Final = struct.Struct("<8s q q q d 16s 16s 16s I B")
_FRAME: Final = struct.Struct("<I I 16s")
_CODEC_BITS: Final = 4
_NO_ROOT: Final = bytes(ROOT_BYTES)
_EMPTY_DIGEST: Final = payload_digest(b"")


class Codec(enum.IntEnum):
    """How a frame is coded, by ``node.weights.codec.frame_codec``. The numbers are on the wire."""

    UNCHANGED = 0
    RAW = 1
    EXPONENT_CONDITIONED = 2
    KEYFRAME = 3
    PLANES = 4
    STEP_PLANES = 5

    @property
    def needs_base(self) -> bool:
        return self in (Codec.UNCHANGED, Codec.EXPONENT_CONDITIONED, Codec.STEP_PLANES)


def payload_limit(codec: Codec, words: int) -> int:
    """Return the most payload bytes an honest encoder makes of ``words``: beyond, it falls back to RAW."""
    return 0 if codec is Codec.UNCHANGED else 2 * words


class DamagedFrameError(RefusedError):
    """A payload is not what the learner signed. Other frames are not in doubt."""

    def __init__(self, frame: int, what: str, *, fix: str = "") -> None:
        super().__init__(Reason.DAMAGED, f"frame {frame}: {what}", fix=fix)
        self.frame = frame


@dataclass(frozen=True, slots=True)
class FrameRecord:
    """One frame: how it is coded, what it makes."""

    codec: Codec
    payload_bytes: int
    new_check: int
    """``words_check`` of the words it makes."""
    payload_digest: bytes

    def makes(self, digest: int) -> bool:
        """Return whether words with this ``words_digest`` are those it makes."""
        return words_check(digest) == self.new_check

    def is_payload(self, payload: bytes) -> bool:
        """Return whether these are the bytes that the learner signed."""
        return len(payload) == self.payload_bytes and payload_digest(payload) == self.payload_digest


@dataclass(frozen=True)
class Manifest:
    """One artifact. A manifest parsed or encoded here is consistent and within the limits."""

    run_id: str
    learner_epoch: int
    layout_digest: bytes
    version: int
    root: bytes
    base_version: int
    """NO_BASE: a keyframe."""
    base_root: bytes
    """Root of the base version; zeros in a keyframe."""
    published_at_s: float
    """Unix seconds on the learner's clock."""
    frames: tuple[FrameRecord, ...]
    signed: bytes = field(default=b"", compare=False, repr=False)
    """As stored and sent, signature included; empty while it is not signed."""

    @property
    def key(self) -> ArtifactKey:
        return ArtifactKey(self.version, self.base_version)

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion(self.version, self.root)

    @property
    def base(self) -> PolicyVersion:
        return PolicyVersion(self.base_version, self.base_root)

    def can_start(self, held: PolicyVersion) -> bool:
        """Return whether a peer that holds this version can apply the artifact."""
        return self.key.is_keyframe or held == self.base

    @cached_property
    def size_bytes(self) -> int:
        """Payload bytes of all frames."""
        return sum(frame.payload_bytes for frame in self.frames)

    @property
    def artifact(self) -> Artifact:
        return Artifact(self.key, self.size_bytes)

    def check_payload(self, frame: int, payload: bytes) -> None:
        """Raise DamagedFrameError unless ``payload`` is what the learner signed for ``frame``."""
        if not self.frames[frame].is_payload(payload):
            raise DamagedFrameError(
                frame,
                f"{len(payload)} bytes for version {self.version} have another digest than signed",
                fix="send this frame again",
            )

    def check_layout(self, layout: Layout) -> None:
        """Refuse a manifest made for another model than ``layout`` describes.

        Raises RefusedError: LAYOUT_MISMATCH; OVER_LIMIT: a payload is larger than its frame allows.
        """
        if self.layout_digest != layout.digest or len(self.frames) != len(layout.frames):
            raise RefusedError(
                Reason.LAYOUT_MISMATCH,
                f"version {self.version} was made for a model with layout {self.layout_digest.hex()}, "
                f"this model has {layout.digest.hex()}",
                fix="give every peer of the run the same model directory",
            )
        for number, (frame, span) in enumerate(zip(self.frames, layout.frames, strict=True)):
            if frame.payload_bytes > payload_limit(frame.codec, span.words):
                raise RefusedError(
                    Reason.OVER_LIMIT,
                    f"frame {number} has a payload of {frame.payload_bytes} bytes for {span.words} words",
                )

    def to_bytes(self) -> bytes:
        """Return the canonical bytes, without signature."""
        run_id = self.run_id.encode()
        header = _HEADER.pack(
            _MAGIC,
            self.learner_epoch,
            self.version,
            self.base_version,
            self.published_at_s,
            self.layout_digest,
            self.root,
            self.base_root,
            len(self.frames),
            len(run_id),
        )
        rows = (
            _FRAME.pack(f.payload_bytes << _CODEC_BITS | f.codec, f.new_check, f.payload_digest)
            for f in self.frames
        )
        return b"".join((header, run_id, *rows))


def sign(manifest: Manifest, key: SigningKey) -> bytes:
    """Return the signed manifest as it is stored and sent."""
    message = manifest.to_bytes()
    return message + key.sign(DOMAIN, message)


def signed_by(manifest: Manifest, key: SigningKey) -> Manifest:
    """Return the manifest with the learner's signature, which needs no verification in this process."""
    return replace(manifest, signed=sign(manifest, key))


def verify_signed(signed: bytes, *, public_key: bytes, run_id: str) -> Manifest:
    """Return the manifest inside ``signed``, if the run's learner signed it for this run.

    Raises RefusedError: OVER_LIMIT, BAD_SIGNATURE, MALFORMED or FOREIGN_RUN, checked in that order.
    """
    if len(signed) > limits.MANIFEST_BYTES:
        raise RefusedError(
            Reason.OVER_LIMIT, f"a manifest has {len(signed)} bytes, at most {limits.MANIFEST_BYTES} allowed"
        )
    message, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    verify(public_key, DOMAIN, message, signature)
    manifest = replace(parse(message), signed=signed)
    if manifest.run_id != run_id:
        raise RefusedError(
            Reason.FOREIGN_RUN, f"version {manifest.version} is of run {manifest.run_id!r}, not {run_id!r}"
        )
    return manifest


def parse(message: bytes) -> Manifest:
    """Return the manifest whose canonical bytes are ``message``.

    Raises RefusedError: MALFORMED or OVER_LIMIT. Nothing else is raised, whatever the bytes are.
    """
    if len(message) < _HEADER.size:
        raise _malformed(f"it has {len(message)} bytes, fewer than its header")
    (
        magic,
        epoch,
        version,
        base_version,
        published_at_s,
        layout_digest,
        root,
        base_root,
        frames,
        name_bytes,
    ) = _HEADER.unpack_from(message)
    if magic != _MAGIC:
        raise _malformed("it does not begin with the magic bytes")
    if not 1 <= frames <= limits.FRAMES_PER_ARTIFACT:
        raise RefusedError(
            Reason.OVER_LIMIT, f"a manifest has {frames} frames, 1 to {limits.FRAMES_PER_ARTIFACT} allowed"
        )
    frames_at = _HEADER.size + name_bytes
    if len(message) != frames_at + frames * _FRAME.size:
        raise _malformed(f"it has {len(message)} bytes for {frames} frames")
    manifest = Manifest(
        run_id=message[_HEADER.size : frames_at].decode("ascii", "replace"),
        learner_epoch=epoch,
        layout_digest=layout_digest,
        version=version,
        root=root,
        base_version=base_version,
        base_root=base_root,
        published_at_s=published_at_s,
        frames=tuple(_frame(*row) for row in _FRAME.iter_unpack(message[frames_at:])),
    )
    _check(manifest)
    return manifest


def _frame(coding: int, new_check: int, digest: bytes) -> FrameRecord:
    payload_bytes, codec = divmod(coding, 1 << _CODEC_BITS)
    try:
        return FrameRecord(Codec(codec), payload_bytes, new_check, digest)
    except ValueError:
        raise _malformed(f"codec {codec} is unknown") from None


def _check(manifest: Manifest) -> None:
    if not re.fullmatch(limits.NAME_PATTERN, manifest.run_id):
        raise _malformed(f"{manifest.run_id[:64]!r} is not a valid run id")
    if manifest.learner_epoch < 0 or manifest.version < 0:
        raise _malformed(f"version {manifest.version} or learner epoch {manifest.learner_epoch} is negative")
    if not NO_BASE <= manifest.base_version < manifest.version:
        raise _malformed(f"version {manifest.version} cannot start from version {manifest.base_version}")
    if not (math.isfinite(manifest.published_at_s) and manifest.published_at_s >= 0):
        raise _malformed(f"{manifest.published_at_s} is not a time of publishing")
    for number, frame in enumerate(manifest.frames):
        _check_frame(number, frame, is_keyframe=manifest.key.is_keyframe)
    if manifest.key.is_keyframe != (manifest.base_root == _NO_ROOT):
        raise _malformed(
            f"base version {manifest.base_version} cannot have base root {manifest.base_root.hex()}"
        )


def _check_frame(number: int, frame: FrameRecord, *, is_keyframe: bool) -> None:
    if is_keyframe and frame.codec.needs_base:
        raise _malformed(f"frame {number} of a keyframe is {frame.codec.name}, which needs a base")
    if (frame.codec is Codec.UNCHANGED) != (frame.payload_bytes == 0):
        raise _malformed(f"frame {number} is {frame.codec.name}, but has {frame.payload_bytes} bytes")
    if frame.payload_bytes > payload_limit(frame.codec, limits.FRAME_WORDS):
        most_bytes = payload_limit(frame.codec, limits.FRAME_WORDS)
        what = f"frame {number} has {frame.payload_bytes} bytes, at most {most_bytes} allowed"
        raise RefusedError(Reason.OVER_LIMIT, what)
    if frame.codec is Codec.UNCHANGED and frame.payload_digest != _EMPTY_DIGEST:
        raise _malformed(f"frame {number} is UNCHANGED, but has the digest of a payload")


def _malformed(what: str) -> RefusedError:
    return RefusedError(Reason.MALFORMED, f"a manifest: {what}")
