"""A new version of the weights -> its manifest and payloads. CPU work: call it in a thread."""

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from node.errors import Reason, RefusedError
from node.policy import NO_BASE, ROOT_BYTES
from node.weights.codec import encode_frame
from node.weights.digests import Words, payload_digest, version_root
from node.weights.held import HeldPolicy, check_size
from node.weights.layout import FrameSpan, Layout
from node.weights.manifest import FrameRecord, Manifest


@dataclass(frozen=True, slots=True)
class EncodedVersion:
    """An artifact in memory: ``payloads[i]`` is what ``manifest.frames[i]`` describes."""

    manifest: Manifest
    payloads: tuple[bytes, ...]


def encode_version(
    words: Words,
    *,
    version: int,
    base: HeldPolicy | None,
    layout: Layout,
    run_id: str,
    learner_epoch: int,
    published_at_s: float,
    executor: Executor | None = None,
) -> EncodedVersion:
    """Code ``words`` against ``base``, or as a keyframe if that is None, each frame as small as it gets.

    Args:
        executor: threads that share the frames, without the interpreter lock; None: only this one.
    Raises:
        RefusedError: NON_FINITE, naming the tensor: a NaN or an infinity is never published.
        ValueError: the words are not of this layout, or ``version`` is not newer than its base.
    """
    check_size(words, layout)
    if base is not None and not base.version.number < version:
        raise ValueError(f"version {version} cannot start from version {base.version.number}")
    each = map if executor is None else executor.map
    coded = list(
        each(lambda frame: _encode(words, base=base, frame=frame, layout=layout), range(len(layout.frames)))
    )
    records = tuple(record for record, _ in coded)
    manifest = Manifest(
        run_id=run_id,
        learner_epoch=learner_epoch,
        layout_digest=layout.digest,
        version=version,
        root=version_root(layout.digest, (record.new_digest for record in records)),
        base_version=NO_BASE if base is None else base.version.number,
        base_root=bytes(ROOT_BYTES) if base is None else base.version.root,
        published_at_s=published_at_s,
        frames=records,
    )
    return EncodedVersion(manifest, tuple(payload for _, payload in coded))


def _encode(
    words: Words, *, base: HeldPolicy | None, frame: int, layout: Layout
) -> tuple[FrameRecord, bytes]:
    span = layout.frames[frame]
    new = words[span.slice]
    old = None if base is None else base.words[span.slice]
    coded = encode_frame(new, base=old)
    if not coded.is_finite:
        raise _non_finite(new, span=span, layout=layout)
    record = FrameRecord(
        codec=coded.codec,
        payload_bytes=len(coded.payload),
        base_digest=0 if base is None else base.frame_digest(frame, layout=layout),
        new_digest=coded.digest,
        payload_digest=payload_digest(coded.payload),
    )
    return record, coded.payload


def _non_finite(words: Words, *, span: FrameSpan, layout: Layout) -> RefusedError:
    # All exponent bits set: without the sign bit such a word is at or above 0x7F80.
    word = span.start_word + int(np.flatnonzero((words & 0x7FFF) >= 0x7F80)[0])
    tensor = layout.tensor_at(word)
    return RefusedError(
        Reason.NON_FINITE,
        f"tensor {tensor.name!r} has a NaN or an infinity at element {word - tensor.start_word}",
        fix="lower the learning rate or the gradient norm bound; nothing was published",
    )
