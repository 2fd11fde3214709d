"""Payloads of one artifact -> the words of its version, verified frame by frame.

    take_held()  frames whose words the base may have already: unchanged ones, those of a keyframe
    missing()    frames whose payload is to be fetched
    put(frame)   payload digest wrong        -> DamagedFrameError: fetch this frame again
                 decoded words are the signed -> in the spare array
                 or else, the base's are      -> nothing to decode
                 or else, a base is needed    -> WrongBaseError: mend this frame from a keyframe
    finish()     every frame there, root verified -> the words

The base is never written to. A chain of artifacts needs two arrays, base and spare, which swap
places after each: never a third. CPU work: call it in a thread.
"""

from collections.abc import Sequence

import numpy as np

from node.errors import Reason, RefusedError
from node.weights.assembly.held import HeldPolicy
from node.weights.codec.frame_codec import decode_frame
from node.weights.format.digests import Words, payload_digest, words_digest
from node.weights.format.dtypes import Dtype
from node.weights.format.layout import Layout
from node.weights.format.manifest import FrameRecord, Manifest
from node.weights.format.payload_codec import Codec


class DamagedFrameError(RefusedError):
    """The payload is not what the learner signed. The others are not in doubt."""

    def __init__(self, frame: int, what: str) -> None:
        super().__init__(Reason.DAMAGED, f"frame {frame}: {what}")
        self.frame = frame


class WrongBaseError(RefusedError):
    """The words held are not those the payload starts from, in this frame."""

    def __init__(self, frame: int, version: int, fault: str) -> None:
        super().__init__(
            Reason.WRONG_BASE, f"frame {frame}: what is held does not make version {version}: {fault}"
        )
        self.frame = frame


class Stage:
    """One version being put together in a spare array. Different frames may be put by different threads."""

    def __init__(
        self, manifest: Manifest, *, layout: Layout, base: HeldPolicy | None, spare: Words | None = None
    ) -> None:
        """Begin.

        Args:
            manifest: verified.
            base: what is held; not needed for a keyframe, but saves decoding what is the same.
            spare: overwritten and then owned by the result; must not be in use. None: allocated.
        Raises:
            RefusedError: LAYOUT_MISMATCH or OVER_LIMIT; WRONG_BASE if ``base`` is another version
                than the manifest starts from.
        """
        manifest.check_layout(layout)
        if not manifest.key.is_keyframe and (
            base is None
            or (base.version.number, base.version.root) != (manifest.base_version, manifest.base_root)
        ):
            held = "nothing" if base is None else f"version {base.version.number} {base.version.root.hex()}"
            raise RefusedError(
                Reason.WRONG_BASE,
                f"version {manifest.version} starts from version {manifest.base_version} "
                f"{manifest.base_root.hex()}, but held is {held}",
                fix="plan again from a keyframe",
            )
        self._manifest = manifest
        self._layout = layout
        self._base = None if base is None else base.words
        self._words = np.empty(layout.words, np.uint16) if spare is None else spare
        self._verified = np.zeros(len(layout.frames), np.bool_)

    def take_held(self) -> tuple[int, ...]:
        """Copy every frame the base has already, and give the unchanged ones it does not have: mend them."""
        wrong = []
        for frame, (record, span) in enumerate(zip(self._manifest.frames, self._layout.frames, strict=True)):
            if self._base is None or not may_be_held(record, self._manifest):
                continue
            if record.makes(words_digest(self._base[span.slice])):
                self._words[span.slice] = self._base[span.slice]
                self._verified[frame] = True
            elif record.codec is Codec.UNCHANGED and not self._verified[frame]:
                wrong.append(frame)
        return tuple(wrong)

    def missing(self) -> tuple[int, ...]:
        """Give the frames whose payload is still needed."""
        return tuple(
            frame
            for frame, record in enumerate(self._manifest.frames)
            if not self._verified[frame] and record.codec is not Codec.UNCHANGED
        )

    def put(self, frame: int, payload: bytes) -> None:
        """Verify, decode and verify again; doing so twice is harmless.

        Raises:
            DamagedFrameError: the payload is not the signed one, or does not make the signed words.
            WrongBaseError: this frame has to be mended.
        """
        if self._verified[frame]:
            return
        span = self._layout.frames[frame]
        base = None if self._base is None else self._base[span.slice]
        make_frame(frame, self._manifest, payload, base=base, out=self._words[span.slice], dtype=span.dtype)
        self._verified[frame] = True

    def mend(self, frame: int, words: Words) -> None:
        """Take the words of a frame that were made another way, such as by ``rebuild_frame``.

        Raises:
            DamagedFrameError: they are not the signed ones.
        """
        if not self._manifest.frames[frame].makes(words_digest(words)):
            raise DamagedFrameError(frame, "the words rebuilt have another digest than signed")
        self._words[self._layout.frames[frame].slice] = words
        self._verified[frame] = True

    def finish(self) -> HeldPolicy:
        """Give the version, all of it verified.

        Raises:
            RefusedError: DAMAGED, if frames are missing or the root is not the signed one.
        """
        absent = np.flatnonzero(~self._verified)
        if absent.size:
            raise RefusedError(
                Reason.DAMAGED,
                f"version {self._manifest.version} lacks {absent.size} frames, first {absent[0]}",
            )
        policy = HeldPolicy.of(self._manifest.version, self._words, layout=self._layout)
        if policy.version != self._manifest.policy_version:
            raise RefusedError(
                Reason.DAMAGED,
                f"the words of version {self._manifest.version} are not those signed, though those of each "
                f"frame were verified: root {policy.version.root.hex()}",
                fix="something else writes to the spare array, or the memory is faulty",
            )
        return policy


def may_be_held(record: FrameRecord, manifest: Manifest) -> bool:
    """Say whether who holds what an artifact starts from may have a frame's new words already.

    A frame of a delta that has a payload differs from its base: to look would cost a pass over the model.
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
    """Make the words of one frame from a keyframe (or from ``start``) and the deltas after it.

    Args:
        steps: verified manifests, each starting from the version before it, with this frame's payload.
        start: the frame's words in the version the first step starts from; None for a keyframe.
    Raises:
        DamagedFrameError: a payload is not the signed one, or does not make the signed words.
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
    """Verify a payload and make the words of its frame in ``out``; worthless if this raises.

    Returns:
        ``words_digest`` of the words.
    Raises:
        DamagedFrameError: the payload is not the signed one, or does not make the signed words.
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
    # The base is hashed only now: words that came out right need no more proof. What was signed made the
    # right words of the right base; if it did not, whoever mends the frame finds out.
    if base is not None and record.makes(digest := words_digest(base)):
        np.copyto(out, base)
        return digest
    if record.codec.needs_base:
        raise WrongBaseError(frame, manifest.version, fault)
    raise DamagedFrameError(frame, fault)
