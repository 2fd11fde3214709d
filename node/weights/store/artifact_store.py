"""The artifacts a peer retains on disk, and which of them the world is told of.

    offer -> incoming/ --last frame verified, fsync, rename--> complete/ --retention--> gone
                 ^                                                |
                 `------------- a frame fails its digest ---------'

Only what is in complete/ is announced. The head is the newest version that a peer with nothing
but the public base model can get to; once announced it never goes back, across restarts too
(``head.json``). A damaged artifact leaves the announcement until its frame was sent again.
A relay announces what is arriving too, and whoever asks for a frame of it waits: a chain of relays
then takes hardly longer than one.

Every method may block on the disk and may be called from any thread: not from an event loop,
except ``announcement``, ``listening`` and ``lease``. One process owns the directory.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Final

from node import durable, limits
from node.errors import Reason, RefusedError, StartupError
from node.policy import Announcement, Artifact, ArtifactKey
from node.weights.format.manifest import Manifest, verify_signed
from node.weights.planning.chain import newest_reachable
from node.weights.planning.retention import surplus
from node.weights.store.artifact_files import (
    ArtifactFiles,
    Draft,
    directory_name,
    disk_errors_refused,
)
from node.weights.store.head_file import Head, StoreMark
from node.weights.store.listeners import Listeners
from node.weights.store.offers import admit_offer
from node.weights.store.readers import Readers

logger = logging.getLogger(__name__)

INCOMING_ARTIFACTS: Final = 64
"""Unfinished offers kept; an honest learner has a handful."""

_HEAD_FILE: Final = "head.json"


class ArtifactStore:
    """Offers in, verified frames in, verified frames out."""

    def __init__(
        self,
        root: Path,
        *,
        public_key: bytes,
        run_id: str,
        retained_keyframes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open ``root``, made if need be, and take up what an earlier process left there.

        Args:
            retained_keyframes: at least 1; what starts before the oldest of them is removed.
            monotonic: seconds; what was asked for lingers by it.
        Raises:
            StartupError: the directory cannot be used.
        """
        self._root = root
        self._complete = root / "complete"
        self._incoming = root / "incoming"
        self._scratch = root / "scratch"
        self._public_key = public_key
        self._run_id = run_id
        self._retained_keyframes = retained_keyframes
        self._arriving: set[ArtifactKey] = set()
        self._quarantined: set[ArtifactKey] = set()
        """Whole once, with a frame that is damaged on disk: it is sent again."""
        self._lock = threading.Lock()
        self._artifacts: dict[ArtifactKey, ArtifactFiles] = {}
        self.readers = Readers(monotonic=monotonic)
        self._listeners = Listeners()
        self._frame_listeners = Listeners()
        self._announcement: Announcement | None = None
        try:
            self._mark = self._recover()
            self._announce()
        except OSError as error:
            raise StartupError(
                f"{root} cannot be used: {error}", fix="Give the node a state directory it can write."
            ) from error

    def announcement(self) -> Announcement | None:
        """Give the head and every artifact that can be fetched; None before the first version."""
        return self._announcement

    def listening(self, listener: Callable[[], object]) -> AbstractContextManager[None]:
        """Call ``listener`` at each change of the announcement, from any thread: it must not block."""
        return self._listeners.listening(listener)

    def whole(self) -> tuple[Artifact, ...]:
        """Give every artifact of which no frame is missing, whatever is announced."""
        with self._lock:
            whole = (a.manifest.artifact for a in self._artifacts.values() if self._is_complete(a))
            return tuple(sorted(whole, key=lambda artifact: artifact.key))

    def listening_to_frames(self, listener: Callable[[], object]) -> AbstractContextManager[None]:
        """Call ``listener`` whenever a frame arrives, from any thread: it must not block."""
        return self._frame_listeners.listening(listener)

    def set_arriving(self, key: ArtifactKey, is_arriving: bool) -> None:
        """Announce an offered artifact while its frames arrive, or only once it is whole.

        Raises:
            RefusedError: UNKNOWN_VERSION; DISK.
        """
        with self._lock, disk_errors_refused(key):
            if is_arriving:
                self._find(key)
                self._arriving.add(key)
            else:
                self._arriving.discard(key)
            self._announce()
        self._frame_listeners.notify()

    def has(self, key: ArtifactKey, frame: int) -> bool:
        """Say whether a frame is here.

        Raises:
            RefusedError: UNKNOWN_VERSION.
        """
        return self._find(key).has(frame)

    def is_awaited(self, key: ArtifactKey, frame: int) -> bool:
        """Say whether a frame is on its way here.

        Raises:
            RefusedError: UNKNOWN_VERSION.
        """
        return key in self._arriving and not self._find(key).has(frame)

    def draft(self) -> AbstractContextManager[Draft]:
        """Give room for the payloads of an artifact that this process makes; ``put_version`` takes it.

        Raises:
            RefusedError: DISK.
        """
        return closing(Draft(self._scratch))

    def put_version(self, signed: bytes, draft: Draft) -> None:
        """Make a whole artifact of its manifest and its payloads, and make it visible.

        Raises:
            RefusedError: as ``offer``.
            ValueError: the payloads are not those of the manifest.
        """
        draft.finish()
        manifest, missing = self.offer(signed)
        if not missing:
            return
        with self._lock, disk_errors_refused(manifest.key):
            artifact = self._find(manifest.key)
            artifact.adopt(draft)
        self._frame_listeners.notify()
        self._finish(artifact)

    def offer(self, signed: bytes) -> tuple[Manifest, tuple[int, ...]]:
        """Make room for an artifact, and give its manifest and the frames that are missing.

        Raises:
            RefusedError: BAD_SIGNATURE, MALFORMED, FOREIGN_RUN, OVER_LIMIT; FENCED by a newer epoch;
                ROLLBACK, if the version is older than the head or another policy has its number; DISK.
        """
        manifest = verify_signed(signed, public_key=self._public_key, run_id=self._run_id)
        with self._lock, disk_errors_refused(manifest.key):
            known = self._artifacts.get(manifest.key)
            if known is None or known.signed != signed:
                retained = [artifact.manifest for artifact in self._artifacts.values()]
                forked = admit_offer(manifest, retained=retained, mark=self._mark.high_water)
                self._raise_epoch(manifest.learner_epoch)
                for key in forked:
                    self._remove(key)
                # The same words coded again: whichever is whole will do.
                if known is None or not self._is_complete(known):
                    self._create(manifest, signed)
            artifact = self._artifacts[manifest.key]
        if artifact.is_whole:
            self._finish(artifact)
        return manifest, artifact.missing()

    def write_frame(self, key: ArtifactKey, frame: int, payload: bytes) -> None:
        """Store one payload; with the last one the artifact becomes visible.

        Raises:
            RefusedError: UNKNOWN_VERSION, if it was not offered; DAMAGED; DISK.
        """
        with self._lock:
            artifact = self._find(key)
            if not artifact.has(frame):
                artifact.write(frame, payload)
        self._frame_listeners.notify()
        if artifact.is_whole:
            self._finish(artifact)

    def missing(self, key: ArtifactKey) -> tuple[int, ...]:
        """Give the frames an offered artifact lacks.

        Raises:
            RefusedError: UNKNOWN_VERSION.
        """
        with self._lock:
            return self._find(key).missing()

    def manifest(self, key: ArtifactKey) -> tuple[Manifest, bytes]:
        """Give the manifest of an artifact, parsed and as signed.

        Raises:
            RefusedError: UNKNOWN_VERSION.
        """
        with self._lock:
            artifact = self._find(key)
            return artifact.manifest, artifact.signed

    def read_payload(self, key: ArtifactKey, frame: int) -> bytes:
        """Give a payload whose digest was checked just now: what a disk did to it meanwhile is found.

        Raises:
            RefusedError: UNKNOWN_VERSION, also where the frame is missing and nothing more of its artifact
                arrives; DAMAGED, if the payload fails its digest.
        """
        with self._lock:
            artifact = self._find(key)
            is_here = artifact.has(frame)
            if not is_here and key not in self._arriving | self._quarantined:
                # Whoever waits for it here may wait for ever: a relay goes on with what is newer.
                raise RefusedError(
                    Reason.UNKNOWN_VERSION,
                    f"version {key.version} from {key.base_version} is not whole here and not on its way",
                    fix="plan again from a new announcement",
                )
            # Opened under the lock: the directory may be moved or removed while it is read.
            file = artifact.open() if is_here else None
        payload = None if file is None else artifact.read(file, frame)
        if is_here and payload is None:
            self._quarantine(artifact, frame)
        if payload is None:
            raise RefusedError(
                Reason.DAMAGED,
                f"frame {frame} of version {key.version} from {key.base_version} is "
                f"{'damaged' if is_here else 'missing'} here",
                fix="ask again later: it is sent again",
            )
        return payload

    def lease(self, key: ArtifactKey, *, lingers: bool = False) -> AbstractContextManager[None]:
        """Keep an artifact from being removed while it is read; it may go at the next change after that.

        Args:
            key: which.
            lingers: its reader will come back for more: it may go only ``LINGER_S`` later.
        Raises:
            RefusedError: UNKNOWN_VERSION.
        """
        return self.readers.reading(key, find=lambda: self._find(key), lingers=lingers)

    def _find(self, key: ArtifactKey) -> ArtifactFiles:
        artifact = self._artifacts.get(key)
        if artifact is None:
            raise RefusedError(
                Reason.UNKNOWN_VERSION,
                f"version {key.version} from {key.base_version} is not here",
                fix="plan again from a new announcement",
            )
        return artifact

    def _is_complete(self, artifact: ArtifactFiles) -> bool:
        return artifact.directory.parent == self._complete

    def _create(self, manifest: Manifest, signed: bytes) -> None:
        self._remove(manifest.key)
        self._bound_incoming()
        if len(self._artifacts) >= limits.ARTIFACTS_PER_ANNOUNCEMENT:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"{len(self._artifacts)} artifacts are retained already",
                fix="publish keyframes, so that what is older can go",
            )
        artifact = ArtifactFiles.create(self._scratch / directory_name(manifest.key), signed, manifest)
        self._artifacts[manifest.key] = artifact
        artifact.move(self._incoming)

    def _bound_incoming(self) -> None:
        """Make room for one more unfinished artifact: the oldest version goes."""
        incoming = sorted(key for key, artifact in self._artifacts.items() if not self._is_complete(artifact))
        for key in incoming[: max(0, len(incoming) + 1 - INCOMING_ARTIFACTS)]:
            self._remove(key)

    def _finish(self, artifact: ArtifactFiles) -> None:
        """Make a whole artifact visible. The lock is not held while the disk is waited for."""
        with disk_errors_refused(artifact.manifest.key):
            artifact.sync()
            with self._lock:
                current = self._artifacts.get(artifact.manifest.key) is artifact
                if current and artifact.is_whole and not self._is_complete(artifact):
                    artifact.move(self._complete)
                    self._quarantined.discard(artifact.manifest.key)
                    self._announce()

    def _quarantine(self, artifact: ArtifactFiles, frame: int) -> None:
        with self._lock:
            artifact.forget(frame)
            key = artifact.manifest.key
            if self._artifacts.get(key) is artifact and self._is_complete(artifact):
                logger.warning(
                    "a frame on disk is damaged",
                    extra={"version": key.version, "base_version": key.base_version, "frame": frame},
                )
                artifact.move(self._incoming)
                self._quarantined.add(key)
                self._announce()

    def _announce(self) -> None:
        """Remove what is surplus, move the head on, and tell the listeners if anything changed."""
        complete = {k: a.manifest.artifact for k, a in self._artifacts.items() if self._is_complete(a)}
        visible = {
            k: a.manifest.artifact for k, a in self._artifacts.items() if k in complete or k in self._arriving
        }
        newest = newest_reachable(visible.values())
        head = self._mark.head
        if newest is not None and (head is None or newest > head.number):
            head = self._head_of(newest)
            self._save(StoreMark(learner_epoch=self._mark.learner_epoch, head=head))
        if head is None:
            return
        goes = surplus(complete.values(), head=head.number, retained_keyframes=self._retained_keyframes)
        for key in self.readers.removable(goes):
            artifact = self.readers.remove_unless_read(key, partial(self._artifacts.pop, key))
            if artifact is not None:
                del visible[key]
                self._discard(artifact)
        announcement = Announcement(
            head=head.policy_version,
            learner_epoch=head.learner_epoch,
            published_at_s=head.published_at_s,
            artifacts=tuple(visible[key] for key in sorted(visible)),
        )
        if announcement != self._announcement:
            self._announcement = announcement
            self._listeners.notify()

    def _head_of(self, number: int) -> Head:
        manifests = (artifact.manifest for artifact in self._artifacts.values())
        manifest = max((m for m in manifests if m.version == number), key=lambda m: m.learner_epoch)
        return Head(
            number=number,
            root=manifest.root.hex(),
            learner_epoch=manifest.learner_epoch,
            published_at_s=manifest.published_at_s,
        )

    def _raise_epoch(self, learner_epoch: int) -> None:
        if learner_epoch > self._mark.learner_epoch:
            self._save(StoreMark(learner_epoch=learner_epoch, head=self._mark.head))

    def _save(self, mark: StoreMark) -> None:
        mark.save(self._root / _HEAD_FILE)
        self._mark = mark

    def _remove(self, key: ArtifactKey) -> None:
        artifact = self._artifacts.pop(key, None)
        if artifact is not None:
            self._discard(artifact)

    def _discard(self, artifact: ArtifactFiles) -> None:
        self._quarantined.discard(artifact.manifest.key)
        # By way of scratch/: a directory half removed is never mistaken for an artifact.
        artifact.move(self._scratch)
        # What cannot be removed now is removed at the next start.
        shutil.rmtree(artifact.directory, ignore_errors=True)

    def _recover(self) -> StoreMark:
        if self._scratch.exists():
            shutil.rmtree(self._scratch)
        for room in (self._complete, self._incoming, self._scratch):
            durable.make_directory(room)
        for room in (self._complete, self._incoming):
            for directory in sorted(room.iterdir()):
                self._recover_artifact(directory, whole=room == self._complete)
        try:
            return StoreMark.load(self._root / _HEAD_FILE)
        except ValueError as error:
            logger.warning(
                "the mark of the store is damaged; taken from what is retained", extra={"error": str(error)}
            )
            epochs = (artifact.manifest.learner_epoch for artifact in self._artifacts.values())
            return StoreMark(learner_epoch=max(epochs, default=0))

    def _recover_artifact(self, directory: Path, *, whole: bool) -> None:
        try:
            artifact = ArtifactFiles.load(
                directory, public_key=self._public_key, run_id=self._run_id, whole=whole
            )
            if directory.name != directory_name(artifact.manifest.key):
                raise RefusedError(Reason.DAMAGED, f"it holds {directory_name(artifact.manifest.key)}")
        except (RefusedError, OSError) as error:
            logger.warning(
                "an artifact on disk is unusable", extra={"path": str(directory), "error": str(error)}
            )
            shutil.rmtree(directory)
            return
        if artifact.manifest.key in self._artifacts:
            # Without power between the syncs of a move it is in both rooms.
            shutil.rmtree(directory)
            return
        self._artifacts[artifact.manifest.key] = artifact
        if artifact.is_whole and not whole:
            artifact.sync()
            artifact.move(self._complete)
        elif whole and not artifact.is_whole:
            shutil.rmtree(self._incoming / directory.name, ignore_errors=True)
            artifact.move(self._incoming)
