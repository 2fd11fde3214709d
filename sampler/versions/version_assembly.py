"""Payloads of one artifact -> the live words, verified frame by frame before one of them changes.

    take_held()  what is there: words that the base has already, payloads from before a restart
    put(frame)   payload and words verified: in the spare copy, or kept to be applied in place
    finish()     every frame there
    apply()      between two decode steps: a change of pointers, or frame after frame in place

In place needs no second copy of the model: while generation goes on every frame is decoded once,
into scratch memory of its size, only to be verified; ``apply`` decodes it again, from the payload on
disk. What can fail has failed before ``apply``. If it fails all the same, or the process dies, what
is on disk makes the live words again: memory is never the only place a version is in.

CPU work: call it in threads. Different frames may be put by different threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from node.errors import Reason, RefusedError
from node.policy import PolicyVersion
from node.weights.assembly.apply import DamagedFrameError, WrongBaseError, make_frame, may_be_held
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.format.payload_codec import Codec
from sampler.engines.model_words import THREADS, LiveWords, ModelWords, frame_digests
from sampler.versions.delta_log import LoggedArtifact


class VersionAssembly(ABC):
    """One version on its way.

    Attributes:
        digests: ``words_digest`` of every frame that was verified.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        layout: Layout,
        base: ModelWords,
        base_version: PolicyVersion,
        payloads: LoggedArtifact | None,
    ) -> None:
        """Begin.

        Args:
            manifest: verified.
            base: what the payloads start from; for a keyframe whatever is held.
            payloads: where they outlive the process; None: nowhere.
        Raises:
            RefusedError: LAYOUT_MISMATCH or OVER_LIMIT; WRONG_BASE if ``base`` is another version
                than the manifest starts from.
        """
        manifest.check_layout(layout)
        if not manifest.key.is_keyframe and base_version != PolicyVersion(
            manifest.base_version, manifest.base_root
        ):
            raise RefusedError(
                Reason.WRONG_BASE,
                f"version {manifest.version} starts from version {manifest.base_version} "
                f"{manifest.base_root.hex()}, but held is version {base_version.number} "
                f"{base_version.root.hex()}",
                fix="plan again from a keyframe",
            )
        self.manifest = manifest
        self._layout = layout
        self._base = base
        self._payloads = payloads
        self._verified = np.zeros(len(layout.frames), np.bool_)
        self.digests = [0] * len(layout.frames)

    def take_held(self) -> tuple[int, ...]:
        """Take the frames that the base has and the payloads kept; return the frames to be repaired."""
        records, spans = self.manifest.frames, self._layout.frames
        to_look_at = [frame for frame, record in enumerate(records) if may_be_held(record, self.manifest)]
        found = dict(
            zip(to_look_at, frame_digests(self._base, [spans[frame] for frame in to_look_at]), strict=True)
        )
        wrong = []
        for frame, record in enumerate(records):
            if frame in found and record.makes(found[frame]):
                self._take_base(frame, self._base.read(spans[frame]))
                self._set_verified(frame, found[frame])
            elif record.codec is Codec.UNCHANGED or not self._take_kept(frame):
                wrong.append(frame)
        return tuple(wrong)

    def missing(self) -> tuple[int, ...]:
        """Give the frames whose payload is still needed."""
        return tuple(
            frame
            for frame, record in enumerate(self.manifest.frames)
            if not self._verified[frame] and record.codec is not Codec.UNCHANGED
        )

    def put(self, frame: int, payload: bytes) -> None:
        """Verify a payload, decode it, verify the words, and keep it; doing so twice is harmless.

        Raises:
            DamagedFrameError: the payload is not the signed one, or does not make the signed words.
            WrongBaseError: this frame has to be repaired.
        """
        if self._verified[frame]:
            return
        try:
            words, digest = self._made(frame, payload, out=self._memory(frame))
        except WrongBaseError:
            # The payload is as signed, and the log wants it whole.
            self._keep(frame, payload)
            raise
        self._take_payload(frame, words, None if self._keep(frame, payload) else payload)
        self._set_verified(frame, digest)

    def repair(self, frame: int, words: Words) -> None:
        """Take the words of a frame that were made another way.

        Raises:
            DamagedFrameError: they are not the signed ones.
        """
        digest = words_digest(words)
        if not self.manifest.frames[frame].makes(digest):
            raise DamagedFrameError(frame, "the words have another digest than signed")
        self._take_words(frame, words)
        self._set_verified(frame, digest)

    def finish(self) -> None:
        """Verify that nothing is missing and that all of it is what was signed.

        Raises:
            RefusedError: DAMAGED, if frames are missing or the root is not the signed one.
        """
        absent = np.flatnonzero(~self._verified)
        if absent.size:
            raise RefusedError(
                Reason.DAMAGED,
                f"version {self.manifest.version} lacks {absent.size} frames, first {absent[0]}",
            )
        root = version_root(self._layout.digest, self._final_digests())
        if root != self.manifest.root:
            raise RefusedError(
                Reason.DAMAGED,
                f"the words of version {self.manifest.version} are not those signed, though those of each "
                f"frame were verified: root {root.hex()}",
                fix="something else writes to the memory of the weights, or it is faulty",
            )

    @abstractmethod
    def apply(self) -> None:
        """Make the live words this version. Between two decode steps, once, after ``finish``.

        Raises:
            RefusedError: DAMAGED: the live words are no version any more.
        """

    @abstractmethod
    def _take_base(self, frame: int, words: Words) -> None: ...

    @abstractmethod
    def _take_payload(self, frame: int, words: Words, unkept: bytes | None) -> None: ...

    @abstractmethod
    def _take_words(self, frame: int, words: Words) -> None: ...

    def _take_kept(self, frame: int) -> bool:
        """Take the payload that arrived before a restart, if any; say False if its base is not right."""
        payload = None if self._payloads is None else self._payloads.payload(frame)
        try:
            if payload is not None:
                self.put(frame, payload)
        except WrongBaseError:
            return False
        return True

    def _keep(self, frame: int, payload: bytes) -> bool:
        return self._payloads is not None and self._payloads.keep(frame, payload)

    def _memory(self, frame: int) -> Words | None:
        """Give where a frame's words are to be made; None: somewhere, they go on to elsewhere."""
        return None

    def _made(self, frame: int, payload: bytes, *, out: Words | None = None) -> tuple[Words, int]:
        span = self._layout.frames[frame]
        words = np.empty(span.words, np.uint16) if out is None else out
        base = self._base.read(span)
        return words, make_frame(frame, self.manifest, payload, base=base, out=words, dtype=span.dtype)

    def _set_verified(self, frame: int, digest: int) -> None:
        self.digests[frame] = digest
        self._verified[frame] = True

    def _final_digests(self) -> Sequence[int]:
        """Give the digest of every frame as it is to be applied."""
        return self.digests


class SpareAssembly(VersionAssembly):
    """A version put together in a second copy, which becomes the live one by a change of pointers.

    Attributes:
        spare: Before ``apply``, where the version is; afterwards, what was live before.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        layout: Layout,
        base: ModelWords,
        base_version: PolicyVersion,
        payloads: LoggedArtifact | None,
        weights: LiveWords,
        spare: ModelWords,
    ) -> None:
        """Begin; ``spare`` is overwritten and must not be in use."""
        super().__init__(manifest, layout=layout, base=base, base_version=base_version, payloads=payloads)
        self._weights = weights
        self.spare = spare

    def apply(self) -> None:
        self.spare = self._weights.swap(self.spare)

    def _final_digests(self) -> Sequence[int]:
        # The copy is read again: it is where someone else may have written meanwhile.
        return frame_digests(self.spare, self._layout.frames)

    def _take_base(self, frame: int, words: Words) -> None:
        self._take_words(frame, words)

    def _take_payload(self, frame: int, words: Words, unkept: bytes | None) -> None:
        if self._memory(frame) is None:
            self._take_words(frame, words)

    def _memory(self, frame: int) -> Words | None:
        return self.spare.memory(self._layout.frames[frame])

    def _take_words(self, frame: int, words: Words) -> None:
        self.spare.write(self._layout.frames[frame], words)


class InPlaceAssembly(VersionAssembly):
    """A version verified frame by frame in scratch memory, then written over the live one."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        layout: Layout,
        base: ModelWords,
        base_version: PolicyVersion,
        payloads: LoggedArtifact | None,
        weights: LiveWords,
    ) -> None:
        """Begin. Payloads that cannot be kept on disk stay in memory."""
        super().__init__(manifest, layout=layout, base=base, base_version=base_version, payloads=payloads)
        self._weights = weights
        self._from_base: set[int] = set()
        self._from_payload: set[int] = set()
        self._unkept: dict[int, bytes] = {}
        self._mended: dict[int, Words] = {}

    def apply(self) -> None:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="apply") as threads:
            # Waits for all of them, and raises what the first to fail raised.
            list(threads.map(self._write, range(len(self._layout.frames))))
        self._weights.settle()

    def _write(self, frame: int) -> None:
        words = self._final(frame)
        if words is not None:
            self._weights.live.write(self._layout.frames[frame], words)
            if words_digest(self._weights.live.read(self._layout.frames[frame])) != self.digests[frame]:
                raise DamagedFrameError(frame, "the words written are not those that were verified")

    def _final(self, frame: int) -> Words | None:
        """Give the words to write; None: they are there."""
        if frame in self._mended:
            return self._mended[frame]
        if frame in self._from_base:
            return self._base.read(self._layout.frames[frame])
        if frame not in self._from_payload:
            return None
        payload = self._unkept.get(frame)
        if payload is None and self._payloads is not None:
            payload = self._payloads.payload(frame)
        if payload is None:
            raise DamagedFrameError(frame, "its payload is gone from the disk")
        words, _ = self._made(frame, payload)
        return words

    def _take_base(self, frame: int, words: Words) -> None:
        if self._base is not self._weights.live:
            self._from_base.add(frame)

    def _take_payload(self, frame: int, words: Words, unkept: bytes | None) -> None:
        self._from_payload.add(frame)
        if unkept is not None:
            self._unkept[frame] = unkept

    def _take_words(self, frame: int, words: Words) -> None:
        self._mended[frame] = words
