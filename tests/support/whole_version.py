"""A whole version put together in a spare array, as simply as can be.

A sampler writes into its engine's tensors instead (``sampler.versions.staging``).
"""

import numpy as np

from bench.held_policy import HeldPolicy
from node.errors import Reason, RefusedError
from node.weights.assembly.apply import make_frame, may_be_held
from node.weights.format.digests import words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Codec, Manifest


class WholeVersion:
    """One version being put together in a spare array. Different frames may be put by different threads."""

    def __init__(self, manifest: Manifest, *, layout: Layout, base: HeldPolicy | None) -> None:
        """Begin.

        Args:
            manifest: verified.
            base: what is held; not needed for a keyframe, but saves decoding what is the same.
        Raises:
            RefusedError: LAYOUT_MISMATCH or OVER_LIMIT; WRONG_BASE if ``base`` is another version
                than the manifest starts from.
        """
        manifest.check_layout(layout)
        held = None if base is None else (base.version.number, base.version.root)
        wanted = (manifest.base_version, manifest.base_root)
        if not manifest.key.is_keyframe and held != wanted:
            raise RefusedError(Reason.WRONG_BASE, f"version {manifest.version} starts from another base")
        self._manifest = manifest
        self._layout = layout
        self._base = None if base is None else base.words
        self._words = np.empty(layout.words, np.uint16)
        self._verified = np.zeros(len(layout.frames), np.bool_)

    def take_held(self) -> tuple[int, ...]:
        """Copy every frame the base has already; return the unchanged ones that are wrong there."""
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
        """Return the frames whose payload is still needed."""
        return tuple(
            frame
            for frame, record in enumerate(self._manifest.frames)
            if not self._verified[frame] and record.codec is not Codec.UNCHANGED
        )

    def put(self, frame: int, payload: bytes) -> None:
        """Verify, decode and verify again; doing so twice is harmless.

        Raises:
            DamagedFrameError: the payload is not the signed one, or does not make the signed words.
            WrongBaseError: the base is wrong in this frame.
        """
        if self._verified[frame]:
            return
        span = self._layout.frames[frame]
        base = None if self._base is None else self._base[span.slice]
        make_frame(frame, self._manifest, payload, base=base, out=self._words[span.slice], dtype=span.dtype)
        self._verified[frame] = True

    def finish(self) -> HeldPolicy:
        """Return the version, all of it verified.

        Raises:
            RefusedError: DAMAGED, if frames are missing or the root is not the signed one.
        """
        absent = np.flatnonzero(~self._verified)
        if absent.size:
            raise RefusedError(Reason.DAMAGED, f"version {self._manifest.version} lacks {absent.size} frames")
        policy = HeldPolicy.of(self._manifest.version, self._words, layout=self._layout)
        if policy.version != self._manifest.policy_version:
            raise RefusedError(Reason.DAMAGED, f"the words of version {policy.version} are not those signed")
        return policy
