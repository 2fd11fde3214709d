"""Changes the live words to the version the served policy asks for, and looks for damage in them.

    begin --frames--> VersionAssembly --finish (disk)--> apply (between two decode steps) --save (disk)-->

A version is a change of the engine's live words: a swap to a spare copy that holds it, or writing it over
them in place. The engine makes the change between two decode steps.

    expected digests --check, check, check ...--> every frame was hashed; again from the first
                          '-- a frame has another digest: the words are no version any more

Memory without ECC flips bits, and nothing else would notice: a version is verified when it is assembled, and
the next delta reads only the frames that it changes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from node.errors import Reason, RefusedError
from node.values.policy import BaseModel, PolicyVersion
from node.weights.format.digests import version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import PUBLIC_VERSION
from sampler.engines.engine_thread import Change
from sampler.engines.restartable_engine import EngineEndedError
from sampler.engines.words.model_words import LiveWords, ModelWords, frame_digests
from sampler.served_policy import Event, ServedPolicy, State
from sampler.versions.saved_policy import SavedPolicy
from sampler.versions.version_assembly import VersionAssembly

logger = logging.getLogger(__name__)

TURN_WORDS: Final = 32 << 20
"""Words hashed in one turn, and at least one frame. With a turn every 2 s, a pass over 0.5 B parameters takes
half a minute, one over 8 B nine; a turn costs about 20 ms of a core."""


class MemoryScrub:
    """The expected digests of the live words, and which frame is next. Blocking."""

    def __init__(self, layout: Layout, *, turn_words: int = TURN_WORDS) -> None:
        self._layout = layout
        self._turn_words = turn_words
        self._digests: tuple[int, ...] = ()
        self._next = 0

    def expect(self, digests: Sequence[int]) -> None:
        """Expect these digests from now on, one for each frame. The next frame stays the same."""
        self._digests = tuple(digests)

    def damaged_frames(self, live: ModelWords) -> int:
        """Count the frames that have changed. Reads all of them."""
        found = frame_digests(live, self._layout.frames)
        return sum(digest != expected for digest, expected in zip(found, self._digests, strict=True))

    def check_next(self, live: ModelWords) -> int | None:
        """Hash the next frames and return the first that has changed, else None.

        Nobody may write to the words meanwhile.
        """
        left = self._turn_words
        for _ in self._layout.frames:
            frame, span = self._next, self._layout.frames[self._next]
            self._next = (self._next + 1) % len(self._layout.frames)
            if words_digest(live.read(span)) != self._digests[frame]:
                return frame
            left -= span.words
            if left <= 0:
                break
        return None


@dataclass(eq=False)
class HeldVersion:
    """For the event loop's thread; disk and CPU work runs in other threads. Call ``load`` first."""

    weights: LiveWords
    policy: ServedPolicy
    """Told what the live words are."""
    _: KW_ONLY
    layout: Layout
    in_place: bool
    """Write versions over the live one, even if they could be assembled in a spare copy."""
    hand_over: Callable[[Change], Awaitable[PolicyVersion | None]]
    """``EngineThread.hand_over``."""
    saved: SavedPolicy
    """The state from which a restart continues."""
    monotonic: Callable[[], float]
    base_model: BaseModel = field(default_factory=BaseModel, init=False)
    """Version 0, as the coordinator is told; empty before ``load``."""
    _is_changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _spare: ModelWords | None = field(default=None, init=False)
    _published_at_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._scrub = MemoryScrub(self.layout)

    def age_s(self, now: float) -> float:
        """Return the seconds since the held version was published; 0 for the base model or a saved copy."""
        return 0.0 if self._published_at_s is None else max(0.0, now - self._published_at_s)

    async def load(self) -> None:
        """Load the newest version on disk, else the base model, into the live words.

        Raises:
            StartupError: the disk cannot be used.
            RefusedError: FENCED or ROLLBACK, if the version is older than one believed before; DAMAGED.
        """
        await asyncio.to_thread(self.saved.open, self.weights.live)
        self.base_model = self.saved.base.model
        self.policy.load(await asyncio.to_thread(self._loaded))

    async def serve(self) -> None:
        """Serve what was loaded; raises as ``apply``."""
        await self._change(lambda: self.policy.held, during=State.EMPTY)

    def begin(self, manifest: Manifest) -> VersionAssembly:
        """Begin to assemble a verified manifest's version; its payloads are logged on disk as they arrive.

        Blocking: call it in a thread.

        Raises RefusedError: FENCED, ROLLBACK, LAYOUT_MISMATCH, OVER_LIMIT or WRONG_BASE.
        """
        self.saved.admitted(manifest)
        payloads = self.saved.begin(manifest)
        base, base_version = self.weights.live, self.policy.held
        if manifest.base_version == PUBLIC_VERSION != base_version.number:
            base, base_version = self.saved.base_words, self.saved.base.version
        spare, spares = None, None if self.in_place else self.weights.spares
        if spares is not None:
            # Until the fetch has ended well, threads of a cancelled one may still write into the spare.
            spare, self._spare = self._spare, None
            spare = spares.new_spare() if spare is None else spare
        return VersionAssembly(
            manifest,
            layout=self.layout,
            weights=self.weights,
            base=base,
            base_version=base_version,
            payloads=payloads,
            spare=spare,
        )

    def finish(self, assembly: VersionAssembly) -> None:
        """Verify that a version is whole, and make it durable before it is served.

        Blocking: call it in a thread.

        Raises RefusedError: DAMAGED; FENCED, ROLLBACK or DISK, as ``SavedPolicy.remember``.
        """
        assembly.finish()
        self.saved.remember(assembly.manifest, assembly.payloads)

    async def apply(self, assembly: VersionAssembly) -> None:
        """Change the live words to a version that is on disk.

        Raises RefusedError: DAMAGED; the words are no version any more.
        """

        def change() -> PolicyVersion:
            assembly.apply()
            self._scrub.expect(assembly.digests)
            return assembly.manifest.policy_version

        await self._change(change, during=State.VERIFIED)
        self._published_at_s = assembly.manifest.published_at_s
        self._spare = assembly.spare

    async def restore(self) -> int:
        """Take the newest version from the disk; return how many frames of a suspect one were damaged.

        Where none is, the live words stay.

        Raises:
            EngineEndedError: the engine failed again.
            RefusedError: DAMAGED: the disk is, too.
            StartupError: the disk cannot be used.
        """
        is_suspect, damaged = self.policy.state is State.SUSPECT, 0
        self.policy.note(Event.RESTORE)

        def change() -> PolicyVersion:
            nonlocal damaged
            damaged = self._scrub.damaged_frames(self.weights.live) if is_suspect else 0
            if is_suspect and not damaged:
                return self.policy.held
            return self._loaded()

        await self._change(change)
        return damaged

    async def save(self) -> None:
        """Copy the held version to disk if that is due."""
        # On the way back to a newer version, the disk may hold what was served before.
        if self.policy.served is not None:
            await asyncio.to_thread(self.saved.compact, self.policy.held, self.weights.live)

    async def check_next_frames(self) -> int | None:
        """Hash some of the live words again; return a frame that is not what was verified, else None."""
        async with self._is_changing:
            if self.policy.served is None:
                return None
            try:
                return await asyncio.to_thread(self._scrub.check_next, self.weights.live)
            except EngineEndedError:
                return None  # the engine's thread finds out by itself

    def _loaded(self) -> PolicyVersion:
        version = self.saved.load(self.weights)
        digests = frame_digests(self.weights.live, self.layout.frames)
        if version_root(self.layout.digest, digests) != version.root:
            raise RefusedError(
                Reason.DAMAGED,
                f"version {version.number} was taken from the disk and is not as it was verified",
                fix="test this machine's memory and disk, and start the sampler again",
            )
        self._scrub.expect(digests)
        return version

    async def _change(self, change: Callable[[], PolicyVersion], *, during: State | None = None) -> None:
        made = self.policy.held

        def checked() -> PolicyVersion | None:
            nonlocal made
            if during not in (None, self.policy.state):
                raise RefusedError(Reason.DAMAGED, f"the version held is {self.policy.state}")
            made = change()
            # After damage, versions older than the one that was served are not sampled from.
            return made if made.number >= self.policy.floor else None

        async with self._is_changing:
            try:
                await self.hand_over(checked)
            except RefusedError:
                self.policy.note(Event.LOSE)
                raise
            self.policy.hold(made, now=self.monotonic())
        if self.policy.served == made:
            logger.info("version held", extra={"version": made.number, "root": made.root.hex()})
