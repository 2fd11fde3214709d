"""Assembles a version from one artifact's payloads, verified frame by frame before a live word changes.

    take_held()  frames the base has already, and payloads kept from before a restart
    put(frame)   payload and words verified; kept in the spare copy, or to be applied in place
    finish()     every frame is there and the root is right
    apply()      between two decode steps: a change of pointers, or frame after frame in place

In place needs no second copy of the model. While generation goes on, each frame is decoded once into scratch
memory, only to be verified; ``apply`` decodes it again from the payload on disk. What can fail has failed
before ``apply``. If it fails all the same, or the process dies, the disk holds what makes the live words
again: memory is never the only place a version is in.

CPU work: call it in threads. Different threads may put different frames.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
from numpy.typing import NDArray

from node.errors import Reason, RefusedError
from node.values.policy import PolicyVersion
from node.weights.assembly.apply import WrongBaseError, make_frame, may_be_held
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Codec, DamagedFrameError, Manifest
from node.weights.planning.cheapest_chain import PUBLIC_VERSION
from sampler.engines.words.model_words import THREADS, LiveWords, ModelWords, frame_digests
from sampler.versions.delta_log import LoggedArtifact


@dataclass(eq=False, repr=False)
class VersionAssembly:
    """One version being assembled, in a spare copy or to be written over the live one.

    Attributes:
        base: What the payloads start from; for a keyframe whatever is held.
        payloads: Where payloads outlive the process; None: nowhere.
        spare: Before ``apply``, the version; it is overwritten and must not be in use. Afterwards, what was
            live before. None: in place.
        digests: ``words_digest`` of every frame that was verified.

    Raises RefusedError: LAYOUT_MISMATCH or OVER_LIMIT; WRONG_BASE if ``base`` is another version than the
    verified manifest starts from, BASE_MISMATCH if that is version 0 on both sides.
    """

    manifest: Manifest
    _: KW_ONLY
    layout: Layout
    weights: LiveWords
    base: ModelWords
    base_version: PolicyVersion
    payloads: LoggedArtifact | None
    spare: ModelWords | None = None
    digests: list[int] = field(init=False)
    _verified: NDArray[np.bool_] = field(init=False)
    _from_base: set[int] = field(init=False, default_factory=set)
    _from_payload: set[int] = field(init=False, default_factory=set)
    """In place, the frames to write, by where their words come from."""
    _unkept: dict[int, bytes] = field(init=False, default_factory=dict)
    """Payloads of those that cannot be kept on disk."""

    def __post_init__(self) -> None:
        self.manifest.check_layout(self.layout)
        start, held = self.manifest.base, self.base_version
        if start.number == held.number == PUBLIC_VERSION and start != held:
            raise RefusedError(
                Reason.BASE_MISMATCH,
                f"your model_dir is not the run's base: its version 0 has root {held.root.hex()}, and "
                f"version {self.manifest.version} starts from {start.root.hex()}, as the learner signed",
                fix="give this sampler the model directory that the learner began with",
            )
        if not self.manifest.can_start(held):
            raise RefusedError(
                Reason.WRONG_BASE,
                f"version {self.manifest.version} starts from version {start.number} {start.root.hex()}, "
                f"but version {held.number} {held.root.hex()} is held",
                fix="plan again from a keyframe",
            )
        self.digests = [0] * len(self.layout.frames)
        self._verified = np.zeros(len(self.layout.frames), np.bool_)

    def take_held(self) -> tuple[int, ...]:
        """Use frames of the base and payloads that were kept; return the frames whose base is wrong."""
        records, spans = self.manifest.frames, self.layout.frames
        looked_at = [frame for frame, record in enumerate(records) if may_be_held(record, self.manifest)]
        digests = frame_digests(self.base, [spans[frame] for frame in looked_at])
        found, wrong = dict(zip(looked_at, digests, strict=True)), []
        for frame, record in enumerate(records):
            if frame in found and record.makes(found[frame]):
                if self.spare is not None:
                    self.spare.write(spans[frame], self.base.read(spans[frame]))
                elif self.base is not self.weights.live:
                    self._from_base.add(frame)
                self._set_verified(frame, found[frame])
            elif record.codec is Codec.UNCHANGED or not self._take_kept(frame):
                wrong.append(frame)
        return tuple(wrong)

    def missing(self) -> tuple[int, ...]:
        """Return the frames whose payload is still needed."""
        return tuple(
            frame
            for frame, record in enumerate(self.manifest.frames)
            if not self._verified[frame] and record.codec is not Codec.UNCHANGED
        )

    def put(self, frame: int, payload: bytes) -> None:
        """Verify a payload, decode it, verify the words and keep it. Doing so twice is harmless.

        Raises DamagedFrameError: the payload is not the signed one, or does not decode to the signed words.
        WrongBaseError: the base is wrong in this frame.
        """
        if self._verified[frame]:
            return
        memory = None if self.spare is None else self.spare.memory(self.layout.frames[frame])
        try:
            words, digest = self._made(frame, payload, out=memory)
        except WrongBaseError:
            # The payload is as signed, and the log needs all of them.
            self._keep(frame, payload)
            raise
        is_kept = self._keep(frame, payload)
        if self.spare is None:
            self._from_payload.add(frame)
            if not is_kept:
                self._unkept[frame] = payload
        elif memory is None:
            self.spare.write(self.layout.frames[frame], words)
        self._set_verified(frame, digest)

    def finish(self) -> None:
        """Verify that no frame is missing and that the root is the signed one.

        Raises RefusedError: DAMAGED.
        """
        absent = np.flatnonzero(~self._verified)
        if absent.size:
            raise RefusedError(
                Reason.DAMAGED,
                f"version {self.manifest.version} lacks {absent.size} frames, first {absent[0]}",
            )
        root = version_root(self.layout.digest, self.digests)
        if root != self.manifest.root:
            raise RefusedError(
                Reason.DAMAGED,
                f"every frame of version {self.manifest.version} was verified, but together they have root "
                f"{root.hex()}, not the signed {self.manifest.root.hex()}",
                fix="test this machine's memory: something else writes to it, or it is faulty",
            )

    def apply(self) -> None:
        """Change the live words to this version. Call it once, between two decode steps, after ``finish``.

        Raises RefusedError: DAMAGED; the live words are no version any more.
        """
        if self.spare is not None:
            assert self.weights.spares is not None, "a spare came from there"
            self.spare = self.weights.spares.swap(self.spare)
            return
        with ThreadPoolExecutor(THREADS, thread_name_prefix="apply") as threads:
            list(threads.map(self._write, sorted(self._from_base | self._from_payload)))
        self.weights.settle()

    def _take_kept(self, frame: int) -> bool:
        """Apply the payload that arrived before a restart, if any; return False if its base is wrong."""
        payload = None if self.payloads is None else self.payloads.payload(frame)
        try:
            if payload is not None:
                self.put(frame, payload)
        except WrongBaseError:
            return False
        return True

    def _keep(self, frame: int, payload: bytes) -> bool:
        return self.payloads is not None and self.payloads.keep(frame, payload)

    def _made(self, frame: int, payload: bytes, *, out: Words | None = None) -> tuple[Words, int]:
        span = self.layout.frames[frame]
        words = np.empty(span.words, np.uint16) if out is None else out
        base = self.base.read(span)
        return words, make_frame(frame, self.manifest, payload, base=base, out=words, dtype=span.dtype)

    def _set_verified(self, frame: int, digest: int) -> None:
        self.digests[frame] = digest
        self._verified[frame] = True

    def _write(self, frame: int) -> None:
        span, live = self.layout.frames[frame], self.weights.live
        live.write(span, self.base.read(span) if frame in self._from_base else self._decoded(frame))
        if words_digest(live.read(span)) != self.digests[frame]:
            raise DamagedFrameError(frame, "the words written are not those that were verified")

    def _decoded(self, frame: int) -> Words:
        payload = self._unkept.get(frame)
        if payload is None and self.payloads is not None:
            payload = self.payloads.payload(frame)
        if payload is None:
            raise DamagedFrameError(frame, "its payload is gone from the disk")
        return self._made(frame, payload)[0]
