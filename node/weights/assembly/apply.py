"""The words of one frame from its payload, both verified.

    payload digest wrong               DamagedFrameError: fetch this frame again
    decoded words are the signed ones  done
    the base's words are               copied: nothing had to be decoded
    the codec needs a base             WrongBaseError: the base is damaged in this frame
    otherwise                          DamagedFrameError

CPU work: call it in a thread.
"""

import numpy as np

from node.errors import Reason, RefusedError
from node.weights.codec.frame_codec import decode_frame
from node.weights.format.digests import Words, words_digest
from node.weights.format.dtypes import Dtype
from node.weights.format.manifest import Codec, DamagedFrameError, FrameRecord, Manifest


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


def make_frame(
    frame: int, manifest: Manifest, payload: bytes, *, base: Words | None, out: Words, dtype: Dtype
) -> int:
    """Verify a payload and write the words of its frame to ``out``, which is worthless if this raises.

    Returns:
        ``words_digest`` of the words.
    Raises DamagedFrameError: the payload is not the signed one, or does not make the signed words.
    WrongBaseError: ``base`` is not what the payload starts from.
    """
    manifest.check_payload(frame, payload)
    record = manifest.frames[frame]
    try:
        digest = decode_frame(record.codec, payload, base=base, out=out, dtype=dtype)
        if record.makes(digest):
            return digest
        fault = "the words decoded have another digest than signed"
    except RefusedError as error:
        fault = str(error)
    # The base is hashed only now: words that came out right need no other proof. The signed payload makes the
    # right words from the right base; if it does not, the base is damaged.
    if base is not None and record.makes(digest := words_digest(base)):
        np.copyto(out, base)
        return digest
    if record.codec.needs_base:
        raise WrongBaseError(frame, manifest.version, fault)
    raise DamagedFrameError(frame, fault)
