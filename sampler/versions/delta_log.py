"""The artifacts fetched since the held policy was last copied to disk: signed, written as they arrive.

    delta_log/<version>-<base>/{manifest,frames}        as in a hub's store

A restarted sampler loads its copy and applies the log to it. An artifact that was being fetched continues
with the frames that are there. Nothing in the log is trusted: every payload is hashed again, and every
decoded frame is compared with the signed digest.

Blocking. One thread at a time, except ``LoggedArtifact.keep``.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from node.errors import Reason, RefusedError
from node.system import durable
from node.values.policy import ArtifactKey, PolicyVersion
from node.weights.format.manifest import Manifest
from node.weights.store.artifact_files import ArtifactFiles, directory_name

logger = logging.getLogger(__name__)


class LoggedArtifact:
    """The payloads of one artifact: those on disk and those still arriving."""

    def __init__(self, files: ArtifactFiles, *, failed: Callable[[RefusedError], None]) -> None:
        """Keep payloads in ``files``; ``failed`` is called with the first that cannot be written."""
        self._files = files
        self._failed = failed
        self._is_broken = False
        self.manifest = files.manifest

    def payload(self, frame: int) -> bytes | None:
        """Return a payload from the disk, its digest verified; None: fetch it."""
        file = self._files.open() if self._files.has(frame) else None
        payload = None if file is None else self._files.read(file, frame, verifies=True)
        if payload is None:
            self._files.forget(frame)
        return payload

    def keep(self, frame: int, payload: bytes) -> bool:
        """Write a verified payload; return whether it can be read again.

        With a full disk the version is applied all the same, but not logged.
        """
        if not (self._is_broken or self._files.has(frame)):
            try:
                self._files.write(frame, payload)
            except RefusedError as refused:
                self._is_broken = True
                self._failed(refused)
        return self._files.has(frame)

    def sync(self) -> None:
        """Return when the kept payloads are durable. Raises OSError: they cannot be written."""
        if not self._is_broken:
            self._files.sync()


class DeltaLog:
    """The artifacts on disk."""

    def __init__(
        self, directory: Path, *, public_key: bytes, run_id: str, count_refusal: Callable[[Reason], None]
    ) -> None:
        """Open the log that an earlier process left in ``directory``, or make one.

        Raises OSError: the directory cannot be used.
        """
        self._directory = directory
        self._count_refusal = count_refusal
        self._artifacts: dict[ArtifactKey, ArtifactFiles] = {}
        durable.make_directory(directory)
        for path in sorted(directory.iterdir()):
            try:
                files = ArtifactFiles.load(path, public_key=public_key, run_id=run_id, whole=False)
            except (OSError, RefusedError) as error:
                logger.warning("logged artifact not usable", extra={"path": str(path), "detail": str(error)})
                shutil.rmtree(path, ignore_errors=True)
                continue
            self._artifacts[files.manifest.key] = files

    @property
    def size_bytes(self) -> int:
        return sum(files.manifest.size_bytes for files in self._artifacts.values())

    def after(self, held: PolicyVersion) -> LoggedArtifact | None:
        """Return the whole artifact that leads furthest from ``held``; None at the end of the log."""
        following = [
            files
            for files in self._artifacts.values()
            if files.is_whole and files.manifest.version > held.number and files.manifest.can_start(held)
        ]
        return self._logged(max(following, key=lambda each: each.manifest.version)) if following else None

    def reach(self, held: PolicyVersion) -> int:
        """Return the number of the version that the log leads to from ``held``."""
        while (logged := self.after(held)) is not None:
            held = logged.manifest.policy_version
        return held.number

    def begin(self, manifest: Manifest) -> LoggedArtifact | None:
        """Open an artifact for writing, anew or where it stopped. Drop other unfinished ones.

        None: the disk is full or broken, so that the version is not logged.
        """
        begun = self._artifacts.get(manifest.key)
        for key in [key for key, files in self._artifacts.items() if not files.is_whole or files is begun]:
            if self._artifacts[key].manifest.signed != manifest.signed:
                self.drop(key)
        if (begun := self._artifacts.get(manifest.key)) is not None:
            return self._logged(begun)
        try:
            files = ArtifactFiles.create(self._directory / directory_name(manifest.key), manifest)
            durable.sync(self._directory)
        except OSError as error:
            self._fail(RefusedError(Reason.DISK, f"version {manifest.version} is not logged: {error}"))
            return None
        self._artifacts[manifest.key] = files
        return self._logged(files)

    def drop(self, key: ArtifactKey) -> None:
        files = self._artifacts.pop(key, None)
        if files is not None:
            shutil.rmtree(files.directory, ignore_errors=True)

    def drop_until(self, number: int) -> None:
        """Remove what leads to versions up to ``number``, because a copy of that one is on disk."""
        for key in [key for key in self._artifacts if key.version <= number]:
            self.drop(key)

    def _logged(self, files: ArtifactFiles) -> LoggedArtifact:
        return LoggedArtifact(files, failed=self._fail)

    def _fail(self, refused: RefusedError) -> None:
        self._count_refusal(refused.reason)
        logger.warning("version not logged", extra={"detail": str(refused)})
