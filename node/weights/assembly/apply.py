"""The words of one frame from its payload, both verified.

    payload digest wrong               DamagedFrameError: fetch this frame again
    decoded words are the signed ones  done
    the base's words are               copied: nothing had to be decoded
    the codec needs a base             WrongBaseError: repair this frame from a keyframe
    otherwise                          DamagedFrameError

CPU work: call it in a thread.
"""

from collections.abc import Sequence

import numpy as np

from node.errors import Reason, RefusedError
from node.weights.codec.frame_codec import decode_frame
from node.weights.format.digests import Words, payload_digest, words_digest
from node.weights.format.dtypes import Dtype
from node.weights.format.layout import Layout
from node.weights.format.manifest import FrameRecord, Manifest
from node.weights.format.payload_codec import Codec


class DamagedFrameError(RefusedError):
    """A payload is not what the learner signed. Other frames are not in doubt."""

    def __init__(self, frame: int, what: str) -> None:
        super().__init__(Reason.DAMAGED, f"frame {frame}: {what}")
        self.frame = frame


class WrongBaseError(RefusedError):
    """The held words of this frame are not those the payload starts from."""

    def __init__(self, frame: int, version: int, fault: str) -> None:
        super().__init__(
            Reason.WRONG_BASE, f"frame {frame}: the held words do not make version {version}: {fault}"
        )
        self.frame = frame


def may_be_held(record: FrameRecord, manifest: Manifest) -> bool:
    """Return whether a peer that holds an artifact's base may already have a frame's new words.

    A frame of a delta that has a payload differs from its base; to compare it costs a pass over the model.
    """
    return record.codec is Codec.UNCHANGED or manifest.key.is_keyframe


def check_payload(frame: int, payload: bytes, manifest: Manifest) -> None:
    """Raise DamagedFrameError unless ``payload`` is what the learner signed for ``frame``."""
    record = manifest.frames[frame]
    if len(payload) != record.payload_bytes or payload_digest(payload) != record.payload_digest:
        raise DamagedFrameError(frame, f"a payload of {len(payload)} bytes has another digest than signed")


def rebuild_frame(
    frame: int, steps: Sequence[tuple[Manifest, bytes]], *, layout: Layout, start: Words | None = None
) -> Words:
    """Return the words of one frame, made from a keyframe (or from ``start``) and the deltas after it.

    Args:
        steps: verified manifests, each starting from the version before it, with this frame's payload.
        start: the frame's words in the version the first step starts from; None for a keyframe.
    Raises DamagedFrameError: a payload is not the signed one, or does not make the signed words.
    WrongBaseError: the steps do not follow from each other in this frame.
    """
    span, words = layout.frames[frame], start
    for manifest, payload in steps:
        out = np.empty(span.words, np.uint16)
        make_frame(frame, manifest, payload, base=words, out=out, dtype=span.dtype)
        words = out
    if words is None:
        raise ValueError("a frame cannot be rebuilt from nothing")
    return words


def make_frame(
    frame: int, manifest: Manifest, payload: bytes, *, base: Words | None, out: Words, dtype: Dtype
) -> int:
    """Verify a payload and write the words of its frame to ``out``, which is worthless if this raises.

    Returns:
        ``words_digest`` of the words.
    Raises DamagedFrameError: the payload is not the signed one, or does not make the signed words.
    WrongBaseError: ``base`` is not what the payload starts from.
    """
    check_payload(frame, payload, manifest)
    record = manifest.frames[frame]
    try:
        digest = decode_frame(record.codec, payload, base=base, out=out, dtype=dtype)
        if record.makes(digest):
            return digest
        fault = "the words decoded have another digest than signed"
    except RefusedError as error:
        fault = str(error)
    # The base is hashed only now: words that came out right need no other proof. The signed payload makes the
    # right words from the right base; if it does not, the repair of the frame shows it.
    if base is not None and record.makes(digest := words_digest(base)):
        np.copyto(out, base)
        return digest
    if record.codec.needs_base:
        raise WrongBaseError(frame, manifest.version, fault)
    raise DamagedFrameError(frame, fault)
