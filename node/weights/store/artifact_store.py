"""The artifacts a peer retains on disk, and which of them it announces.

    offer -> incoming/ --last frame verified, fsync, rename--> complete/ --retention--> gone
                 ^                                                |
                 `------------- a frame fails its digest ---------'

Only what is in complete/ is announced. The head is the newest version that a peer with nothing
but the public base model can get to; once announced it never goes back, across restarts too
(``head.json``). A damaged artifact leaves the announcement until its frame was sent again.
What is complete may be withheld from the announcement for a moment, until peers can have it from elsewhere.
A relay also announces what is arriving, and whoever asks for a frame of it waits: a chain of relays
then takes hardly longer than one.

Every method may block on the disk and may be called from any thread: not from an event loop,
except ``announcement``, ``listening`` and ``lease``. One process owns the directory.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from node.errors import Reason, RefusedError, StartupError
from node.values.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.planning.cheapest_chain import newest_reachable
from node.weights.store.artifact_directories import ArtifactDirectories
from node.weights.store.artifact_files import ArtifactFiles, Draft, disk_errors_refused
from node.weights.store.high_water import HighWater
from node.weights.store.offers import admit_offer, surplus
from node.weights.store.pins import Pins
from node.weights.store.readers import Readers

logger = logging.getLogger(__name__)

HEAD_FILE: Final = "head.json"
PINS_FILE: Final = "pins.json"


Listener = Callable[[], object]
"""Called on the thread that makes a change: it must not block."""


Withholds = Callable[[Artifact], bool]
"""Says whether an artifact that is complete now is withheld. Called on any thread: it must not block."""


@contextmanager
def among(listeners: list[Listener], listener: Listener) -> Iterator[None]:
    """Keep ``listener`` among those that are called, for the time of the body."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def _notify(listeners: list[Listener]) -> None:
    for listener in tuple(listeners):
        listener()


class ArtifactStore:
    """Takes offers and verified frames in, and hands verified frames out."""

    def __init__(
        self,
        root: Path,
        *,
        public_key: bytes,
        run_id: str,
        retained_keyframes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open ``root``, made if need be, and load what an earlier process left there.

        What starts before the oldest of ``retained_keyframes``, at least 1, is removed.

        Raises StartupError: the directory cannot be used.
        """
        self._root = root
        self._public_key = public_key
        self._run_id = run_id
        self._retained_keyframes = retained_keyframes
        self._arriving: set[ArtifactKey] = set()
        self._withheld: set[ArtifactKey] = set()
        self._withholds: Withholds | None = None
        self._awaited: int | None = None
        self._lock = threading.Lock()
        self.readers = Readers(monotonic=monotonic)
        self._listeners: list[Listener] = []
        self._frame_listeners: list[Listener] = []
        self._announcement: Announcement | None = None
        try:
            self._directories = ArtifactDirectories(root, public_key=public_key, run_id=run_id)
            self._mark = self._loaded_mark()
            self._pins = Pins(root / PINS_FILE)
            self._announce()
        except OSError as error:
            raise StartupError(
                f"{root} cannot be used: {error}", fix="Give the node a state directory it can write."
            ) from error

    def announcement(self) -> Announcement | None:
        """Return the head and every artifact that can be fetched; None before the first version."""
        return self._announcement

    def head(self) -> PolicyVersion | None:
        """Return the newest version announced; None before the first."""
        return None if self._announcement is None else self._announcement.head

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        """Call ``listener`` at each change of the announcement or of what is whole."""
        return among(self._listeners, listener)

    def whole(self) -> tuple[Manifest, ...]:
        """Return every complete artifact, announced or not, oldest version first."""
        with self._lock:
            whole = (a.manifest for a in self._directories if self._directories.is_complete(a))
            return tuple(sorted(whole, key=lambda manifest: manifest.key))

    def retained(self) -> tuple[ArtifactKey, ...]:
        """Return every artifact that is here, complete or not."""
        with self._lock:
            return tuple(artifact.manifest.key for artifact in self._directories)

    @contextmanager
    def withholding(self, withholds: Withholds) -> Iterator[None]:
        """Withhold the new artifacts that ``withholds`` says while the body runs, each until ``release``."""
        self._withholds = withholds
        try:
            yield
        finally:
            self._withholds = None
            for key in tuple(self._withheld):
                try:
                    self.release(key)
                except RefusedError as refused:
                    logger.warning("artifact not announced yet", extra={"detail": str(refused)})

    def release(self, key: ArtifactKey) -> None:
        """Announce an artifact that was withheld. Raises RefusedError: DISK; the next announcement has it."""
        with self._lock, disk_errors_refused(key):
            self._withheld.discard(key)
            self._announce()

    def pin(self, versions: Collection[int]) -> None:
        """Keep a way to each of these versions, unannounced beyond retention, and to no others pinned before.

        Raises OSError: the disk is full or failing; those pinned before stay.
        """
        with self._lock:
            self._pins.set(versions)
            self._announce()

    @property
    def pinned(self) -> frozenset[int]:
        """The versions that were pinned last, by this process or an earlier one."""
        return self._pins.versions

    def await_readers_of(self, version: int | None) -> None:
        """Keep a way to a version that slow peers are still to come to; None: to the head alone."""
        self._awaited = version

    def listening_to_frames(self, listener: Listener) -> AbstractContextManager[None]:
        """Call ``listener`` whenever a frame arrives."""
        return among(self._frame_listeners, listener)

    def set_arriving(self, key: ArtifactKey, is_arriving: bool) -> None:
        """Announce an offered artifact while its frames arrive, or only once it is complete.

        Raises RefusedError: UNKNOWN_VERSION; DISK.
        """
        with self._lock, disk_errors_refused(key):
            if is_arriving:
                self._directories.find(key)
                self._arriving.add(key)
            else:
                self._arriving.discard(key)
            self._announce()
        _notify(self._frame_listeners)

    def has(self, key: ArtifactKey, frame: int) -> bool:
        """Return whether a frame is here. Raises RefusedError: UNKNOWN_VERSION."""
        return self._directories.find(key).has(frame)

    def is_awaited(self, key: ArtifactKey, frame: int) -> bool:
        """Return whether a frame is on its way here. Raises RefusedError: UNKNOWN_VERSION."""
        return key in self._arriving and not self._directories.find(key).has(frame)

    def draft(self) -> AbstractContextManager[Draft]:
        """Return a draft for the payloads of an artifact that this process makes; ``put_version`` takes it.

        Raises RefusedError: DISK.
        """
        return closing(self._directories.draft())

    def put_version(self, manifest: Manifest, draft: Draft) -> None:
        """Store an artifact of this process, from its signed manifest and its payloads, and announce it.

        Raises RefusedError: as ``offer``. ValueError: the payloads are not those of the manifest.
        """
        draft.finish()
        if not self.offer(manifest):
            return
        with self._lock, disk_errors_refused(manifest.key):
            artifact = self._directories.find(manifest.key)
            artifact.adopt(draft)
        _notify(self._frame_listeners)
        self._finish(artifact)

    def offer_signed(self, signed: bytes) -> tuple[Manifest, tuple[int, ...]]:
        """Verify a manifest and offer it; return it with the frames that are missing.

        Raises RefusedError: as ``verify_signed`` and ``offer``.
        """
        manifest = verify_signed(signed, public_key=self._public_key, run_id=self._run_id)
        return manifest, self.offer(manifest)

    def offer(self, manifest: Manifest) -> tuple[int, ...]:
        """Prepare for an artifact, whose signature is verified; return the frames that are missing.

        Raises RefusedError: OVER_LIMIT; FENCED by a newer epoch; ROLLBACK: the version is older than the
        head, or another policy has its number; DISK.
        """
        with self._lock, disk_errors_refused(manifest.key):
            known = self._directories.get(manifest.key)
            if known is None or known.manifest != manifest:
                retained = [artifact.manifest for artifact in self._directories]
                forked = admit_offer(manifest, retained=retained, mark=self._mark)
                if manifest.learner_epoch > self._mark.learner_epoch:
                    self._save(self._mark.model_copy(update={"learner_epoch": manifest.learner_epoch}))
                for key in forked:
                    self._directories.remove(key)
                # The same words coded again: whichever is whole will do.
                if known is None or not self._directories.is_complete(known):
                    self._directories.create(manifest)
            artifact = self._directories.find(manifest.key)
        if artifact.is_whole:
            self._finish(artifact)
        return artifact.missing()

    def write_frame(self, key: ArtifactKey, frame: int, payload: bytes) -> None:
        """Store one payload. With the last one the artifact is complete and announced.

        Raises RefusedError: UNKNOWN_VERSION: it was not offered; DAMAGED; DISK.
        """
        with self._lock:
            artifact = self._directories.find(key)
            if not artifact.has(frame):
                artifact.manifest.check_payload(frame, payload)
                artifact.write(frame, payload)
        _notify(self._frame_listeners)
        if artifact.is_whole:
            self._finish(artifact)

    def missing(self, key: ArtifactKey) -> tuple[int, ...]:
        """Return the frames an offered artifact lacks. Raises RefusedError: UNKNOWN_VERSION."""
        with self._lock:
            return self._directories.find(key).missing()

    def manifest(self, key: ArtifactKey) -> Manifest:
        """Return the manifest of an artifact. Raises RefusedError: UNKNOWN_VERSION."""
        with self._lock:
            return self._directories.find(key).manifest

    def read_payload(self, key: ArtifactKey, frame: int, *, verifies: bool = True) -> bytes:
        """Return a payload, which was verified when it came.

        Args:
            verifies: compare it with its digest once more, which finds what the disk has damaged since; such
                an artifact is not announced until the frame was sent again. Readers that compare it
                themselves do without.
        Raises RefusedError: UNKNOWN_VERSION, also if the frame is missing and nothing more of its artifact
        arrives; DAMAGED: the payload fails its digest, or is missing for now.
        """
        with self._lock:
            artifact = self._directories.find(key)
            is_here = artifact.has(frame)
            if not is_here and not (key in self._arriving or artifact.is_quarantined):
                # Waiting for it could take for ever: a relay may have left it for something newer.
                raise RefusedError(
                    Reason.UNKNOWN_VERSION,
                    f"version {key.version} from {key.base_version} is incomplete here and not on its way",
                    fix="plan again from a new announcement",
                )
            # Opened under the lock: the directory may be moved or removed while it is read.
            file = artifact.open() if is_here else None
        payload = None if file is None else artifact.read(file, frame, verifies=verifies)
        if is_here and payload is None:
            self._quarantine(artifact, frame)
        if payload is None:
            raise RefusedError(
                Reason.DAMAGED,
                f"frame {frame} of version {key.version} from {key.base_version} is "
                f"{'damaged' if is_here else 'missing'} here",
                fix="ask again later: it is being sent again",
            )
        return payload

    def lease(self, key: ArtifactKey, *, lingers: bool = False) -> AbstractContextManager[None]:
        """Keep an artifact from being removed for the time of the body.

        Args:
            lingers: its reader is expected back for more: it stays ``LINGER_S`` longer.
        Raises RefusedError: UNKNOWN_VERSION.
        """
        return self.readers.reading(key, find=lambda: self._directories.find(key), lingers=lingers)

    def _finish(self, artifact: ArtifactFiles) -> None:
        """Announce a whole artifact once it is on disk. The lock is not held during the sync."""
        with disk_errors_refused(artifact.manifest.key):
            artifact.sync()
            with self._lock:
                is_current = self._directories.is_current(artifact)
                if is_current and artifact.is_whole and not self._directories.is_complete(artifact):
                    is_new = not artifact.is_quarantined and artifact.manifest.key not in self._arriving
                    self._directories.complete(artifact)
                    withholds = self._withholds  # another thread may end the withholding
                    if is_new and withholds is not None and withholds(artifact.manifest.artifact):
                        self._withheld.add(artifact.manifest.key)
                    if not self._announce():  # as where it was withheld, or announced while it arrived
                        _notify(self._listeners)

    def _quarantine(self, artifact: ArtifactFiles, frame: int) -> None:
        with self._lock:
            artifact.forget(frame)
            key = artifact.manifest.key
            if self._directories.is_current(artifact) and self._directories.is_complete(artifact):
                logger.warning(
                    "a frame on disk is damaged",
                    extra={"version": key.version, "base_version": key.base_version, "frame": frame},
                )
                self._directories.quarantine(artifact)
                self._announce()

    def _announce(self) -> bool:
        """Remove what is surplus, advance the head, and notify the listeners if anything changed.

        Returns whether it did.
        """
        complete = self._directories.complete_artifacts()
        manifests = {artifact.manifest.key: artifact.manifest for artifact in self._directories}
        self._withheld &= complete.keys()
        shown = (complete.keys() | self._arriving) - self._withheld
        visible = {k: m.artifact for k, m in manifests.items() if k in shown}
        newest = newest_reachable(visible.values())
        head = self._mark.head
        if newest is not None and (head is None or newest > head.number):
            makers = (manifest for manifest in manifests.values() if manifest.version == newest)
            self._save(self._mark.after(max(makers, key=lambda manifest: manifest.learner_epoch)))
            head = self._mark.head
        if head is None:
            return False
        goes = surplus(
            # One that is withheld leads nobody anywhere yet: what it replaces stays until then.
            (artifact for key, artifact in complete.items() if key not in self._withheld),
            wanted=(head.number, self._awaited),
            retained_keyframes=self._retained_keyframes,
        )
        pinned = self._pins.kept(goes, complete.values())
        for key in pinned:
            visible.pop(key, None)
        for key in self.readers.removable(goes - pinned):
            artifact = self.readers.remove_unless_read(key, partial(self._directories.pop, key))
            if artifact is not None:
                visible.pop(key, None)
                self._directories.discard(artifact)
        announcement = Announcement(
            head=head.policy_version,
            learner_epoch=head.learner_epoch,
            published_at_s=head.published_at_s,
            artifacts=tuple(visible[key] for key in sorted(visible)),
        )
        if announcement == self._announcement:
            return False
        self._announcement = announcement
        _notify(self._listeners)
        return True

    def _save(self, mark: HighWater) -> None:
        mark.save(self._root / HEAD_FILE)
        self._mark = mark

    def _loaded_mark(self) -> HighWater:
        try:
            return HighWater.load(self._root / HEAD_FILE)
        except ValueError as error:
            logger.warning(
                "the mark of the store is damaged; taken from what is retained",
                extra={"error": str(error)},
            )
            epochs = (artifact.manifest.learner_epoch for artifact in self._directories)
            return HighWater(learner_epoch=max(epochs, default=0))
