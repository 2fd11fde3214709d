"""Codes versions, where their words are: masters against the version published last, and that one alone.

    masters --code_masters--> made --keep--> published --code_published, merge--> further artifacts
                                ^
    store --------rebuild-------'    after a restart

Two versions of the coder's own frames are in memory: the one published last and the one being made. They
change places when ``keep`` is called, so a pass that fails has changed nothing. Beyond them, the frames under
way bound the memory. Blocking: one call at a time. ``learner.ranks`` has a coder that is spread over ranks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from node.weights.assembly.encode import CodedFrame, FrameWords, code_frames
from node.weights.assembly.merge import MergedFrame, merge_frame
from node.weights.assembly.stored import StoredVersion
from node.weights.format.digests import Words, words_digest
from node.weights.format.layout import Layout

if TYPE_CHECKING:
    from learner.masters.master_words import MasterWords

Put = Callable[[bytes], object]
"""Takes the payloads of all frames, in the order of the layout."""

_UNDER_WAY_PER_THREAD: Final = 2
"""Frames: while one is coded, another may wait for its place in the file."""


class VersionCoder(Protocol):
    """Codes versions of one model."""

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        ...

    @property
    def has_published(self) -> bool:
        """Whether there is a version to code against."""
        ...

    def code_masters(self, put: Put) -> Sequence[CodedFrame]:
        """Code the masters against the published version, or as a keyframe if there is none.

        When this returns or raises, nobody reads the masters any more.

        Raises:
            RefusedError: NON_FINITE; and whatever ``put`` raises.
        """
        ...

    def keep(self) -> None:
        """Take the version made last for the published one."""
        ...

    def code_published(self, put: Put) -> Sequence[CodedFrame]:
        """Code the published version as a keyframe. Raises what ``put`` raises."""
        ...

    def merge(
        self, old: StoredVersion, put: Put, *, is_superseded: Callable[[], bool]
    ) -> Sequence[MergedFrame] | None:
        """Code the published version against an older one; None: superseded meanwhile.

        Raises:
            RefusedError: DAMAGED, UNKNOWN_VERSION or WRONG_BASE: the old words cannot be rebuilt.
        """
        ...

    def rebuild(self, stored: StoredVersion) -> list[int]:
        """Make a version again, to be kept if these digests of its frames are those of its root.

        Raises:
            RefusedError: as ``merge``.
        """
        ...

    def close(self) -> None:
        """Start nothing any more."""
        ...


class OwnFrames:
    """Words of some frames, twice: as they were published last, and as they are being made."""

    def __init__(self, layout: Layout, frames: Sequence[int]) -> None:
        """Make room for ``frames``; memory that is never written costs nothing."""
        self.frames = tuple(frames)
        self._slices: dict[int, slice] = {}
        words = 0
        for frame in frames:
            self._slices[frame] = slice(words, words + layout.frames[frame].words)
            words += layout.frames[frame].words
        self._made: Words = np.empty(words, np.uint16)
        self._published: Words | None = None

    @property
    def has_published(self) -> bool:
        """Whether a version was kept."""
        return self._published is not None

    @property
    def size_bytes(self) -> int:
        """Size of both versions, or of the one that there is."""
        return self._made.nbytes + (0 if self._published is None else self._published.nbytes)

    def made(self, frame: int) -> Words:
        """Return the words being made of one frame, to be written."""
        return self._made[self._slices[frame]]

    def published(self, frame: int) -> Words:
        """Return the published words of one frame.

        Raises:
            ValueError: none was kept yet.
        """
        if self._published is None:
            raise ValueError("no version was published yet")
        return self._published[self._slices[frame]]

    def keep(self) -> None:
        """Take what was made for the published version, and the one before it for the next to be made."""
        spare = np.empty_like(self._made) if self._published is None else self._published
        self._published, self._made = self._made, spare


class LocalCoder:
    """A coder of a model whose masters are all in this process."""

    def __init__(self, masters: "MasterWords", *, threads: int) -> None:
        """Code what ``masters`` reads.

        Args:
            threads: that share a pass, at least 1.
        """
        self.layout = masters.layout
        self._masters = masters
        self._own = OwnFrames(masters.layout, range(len(masters.layout.frames)))
        self._under_way = _UNDER_WAY_PER_THREAD * threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="coding")

    @property
    def has_published(self) -> bool:
        """Whether there is a version to code against."""
        return self._own.has_published

    def code_masters(self, put: Put) -> Sequence[CodedFrame]:
        """See ``VersionCoder``."""

        def read(frame: int) -> Words:
            words = self._own.made(frame)
            self._masters.read(frame, words)
            return words

        return self._code(read, base=self._own.published if self.has_published else None, put=put)

    def keep(self) -> None:
        """See ``VersionCoder``."""
        self._own.keep()

    def code_published(self, put: Put) -> Sequence[CodedFrame]:
        """See ``VersionCoder``."""
        return self._code(self._own.published, base=None, put=put)

    def merge(
        self, old: StoredVersion, put: Put, *, is_superseded: Callable[[], bool]
    ) -> Sequence[MergedFrame] | None:
        """See ``VersionCoder``. In this thread: it is done in spare time."""
        merged = []
        for frame in self._own.frames:
            new = self._own.published(frame)
            one, payload = merge_frame(frame, new=new, old=old.words(frame), layout=self.layout)
            put(payload)
            merged.append(one)
            if is_superseded():
                return None
        return merged

    def rebuild(self, stored: StoredVersion) -> list[int]:
        """See ``VersionCoder``."""

        def rebuild(frame: int) -> int:
            words = self._own.made(frame)
            np.copyto(words, stored.words(frame))
            return words_digest(words)

        return list(self._pool.map(rebuild, self._own.frames))

    def close(self) -> None:
        """See ``VersionCoder``."""
        self._pool.shutdown(wait=False)

    def _code(self, new: FrameWords, *, base: FrameWords | None, put: Put) -> Sequence[CodedFrame]:
        return code_frames(
            self._own.frames,
            new=new,
            base=base,
            layout=self.layout,
            put=put,
            executor=self._pool,
            under_way=self._under_way,
        )
