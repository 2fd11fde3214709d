"""The artifacts a peer retains on disk.

    offer -> incoming/ --last frame verified, fsync, rename--> complete/ --retention--> gone
                 ^                                                |
                 `------------- a frame fails its digest ---------'

What is in complete/ is announced (``catalogue``). A damaged artifact leaves the announcement until its frame
was sent again. What is complete may be withheld for a moment, until peers can have it from elsewhere. A relay
also announces what is arriving, and a peer that asks for a frame of it waits: a chain of relays then takes
hardly longer than one.

Every method may block on the disk and may be called from any thread: not from an event loop,
except ``announcement``, ``listening`` and ``lease``. One process owns the directory.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from node.errors import Reason, RefusedError, StartupError
from node.system.listeners import Listener, Listeners
from node.values.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.store.artifact_directories import ArtifactDirectories
from node.weights.store.artifact_files import ArtifactFiles, Draft, disk_errors_refused
from node.weights.store.catalogue import Catalogue
from node.weights.store.offers import admit_offer

logger = logging.getLogger(__name__)

Withholds = Callable[[Artifact], bool]
"""Says whether an artifact that is complete now is withheld. Called on any thread: it must not block."""


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
        self._public_key = public_key
        self._run_id = run_id
        self._withholds: Withholds | None = None
        self._lock = threading.Lock()
        self._frames = Listeners()
        try:
            self._directories = ArtifactDirectories(root, public_key=public_key, run_id=run_id)
            self._catalogue = Catalogue(
                root, self._directories, retained_keyframes=retained_keyframes, monotonic=monotonic
            )
        except OSError as error:
            raise StartupError(
                f"{root} cannot be used: {error}", fix="Give the node a state directory it can write."
            ) from error

    def announcement(self) -> Announcement | None:
        """Return the head and every artifact that can be fetched; None before the first version."""
        return self._catalogue.announcement

    def head(self) -> PolicyVersion | None:
        """Return the newest version announced; None before the first."""
        announcement = self._catalogue.announcement
        return None if announcement is None else announcement.head

    @property
    def lingering_artifacts(self) -> int:
        """How many surplus artifacts stay for readers that are expected back."""
        return self._catalogue.readers.lingering_artifacts

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        """Call ``listener`` at each change of the announcement or of what is whole."""
        return self._catalogue.changes.listening(listener)

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
            for key in tuple(self._catalogue.withheld):
                try:
                    self.release(key)
                except RefusedError as refused:
                    logger.warning("artifact not announced yet", extra={"detail": str(refused)})

    def release(self, key: ArtifactKey) -> None:
        """Announce an artifact that was withheld. Raises RefusedError: DISK; the next announcement has it."""
        with self._lock, disk_errors_refused(key):
            self._catalogue.withheld.discard(key)
            self._catalogue.update()

    def pin(self, versions: Collection[int]) -> None:
        """Keep a way to each of these versions, unannounced beyond retention, and to no others pinned before.

        Raises OSError: the disk is full or failing; those pinned before stay.
        """
        with self._lock:
            self._catalogue.pins.set(versions)
            self._catalogue.update()

    @property
    def pinned(self) -> frozenset[int]:
        """The versions that were pinned last, by this process or an earlier one."""
        return self._catalogue.pins.versions

    def await_readers_of(self, version: int | None) -> None:
        """Keep a way to a version that slow peers are still to come to; None: to the head alone."""
        self._catalogue.awaited = version

    def listening_to_frames(self, listener: Listener) -> AbstractContextManager[None]:
        """Call ``listener`` whenever a frame arrives."""
        return self._frames.listening(listener)

    def set_arriving(self, key: ArtifactKey, is_arriving: bool) -> None:
        """Announce an offered artifact while its frames arrive, or only once it is complete.

        Raises RefusedError: UNKNOWN_VERSION; DISK.
        """
        with self._lock, disk_errors_refused(key):
            if is_arriving:
                self._directories.find(key)
                self._catalogue.arriving.add(key)
            else:
                self._catalogue.arriving.discard(key)
            self._catalogue.update()
        self._frames.notify()

    def has(self, key: ArtifactKey, frame: int) -> bool:
        """Return whether a frame is here. Raises RefusedError: UNKNOWN_VERSION."""
        return self._directories.find(key).has(frame)

    def is_awaited(self, key: ArtifactKey, frame: int) -> bool:
        """Return whether a frame is on its way here. Raises RefusedError: UNKNOWN_VERSION."""
        return key in self._catalogue.arriving and not self._directories.find(key).has(frame)

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
        self._frames.notify()
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
                forked = admit_offer(manifest, retained=retained, mark=self._catalogue.mark)
                self._catalogue.raise_epoch(manifest.learner_epoch)
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
        self._frames.notify()
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
            if not is_here and not (key in self._catalogue.arriving or artifact.is_quarantined):
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
        return self._catalogue.readers.reading(key, find=lambda: self._directories.find(key), lingers=lingers)

    def _finish(self, artifact: ArtifactFiles) -> None:
        """Announce a whole artifact once it is on disk. The lock is not held during the sync."""
        with disk_errors_refused(artifact.manifest.key):
            artifact.sync()
            with self._lock:
                is_current = self._directories.is_current(artifact)
                if is_current and artifact.is_whole and not self._directories.is_complete(artifact):
                    is_seen = artifact.is_quarantined or artifact.manifest.key in self._catalogue.arriving
                    self._directories.complete(artifact)
                    withholds = self._withholds  # another thread may end the withholding
                    if not is_seen and withholds is not None and withholds(artifact.manifest.artifact):
                        self._catalogue.withheld.add(artifact.manifest.key)
                    if not self._catalogue.update():  # as where it was withheld, or announced as it arrived
                        self._catalogue.changes.notify()

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
                self._catalogue.update()
