"""The directories of a store: every artifact is in one of two, and passes through a third.

    root/incoming     offered; frames are missing
    root/complete     all frames were verified and are on disk
    root/scratch      being made or removed; emptied at the start

Not thread-safe: the store's lock serialises the calls.
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.errors import Reason, RefusedError
from node.system import durable
from node.values import limits
from node.values.policy import Artifact, ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.store.artifact_files import ArtifactFiles, Draft, directory_name

logger = logging.getLogger(__name__)

INCOMING_ARTIFACTS: Final = 64
"""Incomplete offers kept; an honest learner has a handful."""


class ArtifactDirectories:
    """The artifacts on disk, by key."""

    def __init__(self, root: Path, *, public_key: bytes, run_id: str) -> None:
        """Open ``root``, made if need be, and load what an earlier process left there.

        Raises OSError: the directory cannot be used.
        """
        self._complete = root / "complete"
        self._incoming = root / "incoming"
        self._scratch = root / "scratch"
        self._public_key = public_key
        self._run_id = run_id
        self._artifacts: dict[ArtifactKey, ArtifactFiles] = {}
        if self._scratch.exists():
            shutil.rmtree(self._scratch)
        for directory in (self._complete, self._incoming, self._scratch):
            durable.make_directory(directory)
        for parent in (self._complete, self._incoming):
            for directory in sorted(parent.iterdir()):
                self._load(directory, whole=parent == self._complete)

    def __iter__(self) -> Iterator[ArtifactFiles]:
        return iter(self._artifacts.values())

    def draft(self) -> Draft:
        """Return an empty draft of an artifact's payloads. Raises RefusedError: DISK."""
        return Draft(self._scratch)

    def get(self, key: ArtifactKey) -> ArtifactFiles | None:
        return self._artifacts.get(key)

    def find(self, key: ArtifactKey) -> ArtifactFiles:
        """Return an artifact. Raises RefusedError: UNKNOWN_VERSION."""
        artifact = self._artifacts.get(key)
        if artifact is None:
            raise RefusedError(
                Reason.UNKNOWN_VERSION,
                f"version {key.version} from {key.base_version} is not here",
                fix="plan again from a new announcement",
            )
        return artifact

    def complete_artifacts(self) -> dict[ArtifactKey, Artifact]:
        """Return the complete artifacts as they are announced."""
        return {key: a.manifest.artifact for key, a in self._artifacts.items() if self.is_complete(a)}

    def is_complete(self, artifact: ArtifactFiles) -> bool:
        return artifact.directory.parent == self._complete

    def is_current(self, artifact: ArtifactFiles) -> bool:
        """Return whether an artifact was neither removed nor replaced."""
        return self._artifacts.get(artifact.manifest.key) is artifact

    def create(self, manifest: Manifest) -> None:
        """Make an empty artifact, instead of an earlier one of its key.

        Beyond INCOMING_ARTIFACTS incomplete ones, the oldest version goes.

        Raises RefusedError: OVER_LIMIT. OSError: the disk does not take it.
        """
        self.remove(manifest.key)
        incoming = sorted(artifact.manifest.key for artifact in self if not self.is_complete(artifact))
        for key in incoming[: max(0, len(incoming) + 1 - INCOMING_ARTIFACTS)]:
            self.remove(key)
        if len(self._artifacts) >= limits.ARTIFACTS_PER_ANNOUNCEMENT:
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"{len(self._artifacts)} artifacts are retained already, the most allowed",
                fix="publish keyframes, so that older artifacts can be removed",
            )
        artifact = ArtifactFiles.create(self._scratch / directory_name(manifest.key), manifest)
        self._artifacts[manifest.key] = artifact
        artifact.move(self._incoming)

    def complete(self, artifact: ArtifactFiles) -> None:
        """Move a whole artifact, whose payloads are on disk, to ``complete``."""
        artifact.move(self._complete)
        artifact.is_quarantined = False

    def quarantine(self, artifact: ArtifactFiles) -> None:
        """Move an artifact back to ``incoming``: a frame is damaged on disk, and is sent again."""
        artifact.move(self._incoming)
        artifact.is_quarantined = True

    def pop(self, key: ArtifactKey) -> ArtifactFiles:
        """Forget an artifact; ``discard`` removes its files."""
        return self._artifacts.pop(key)

    def discard(self, artifact: ArtifactFiles) -> None:
        """Remove the files of an artifact that was forgotten."""
        # By way of scratch/: a directory half removed is never mistaken for an artifact.
        artifact.move(self._scratch)
        # What cannot be removed now is removed at the next start.
        shutil.rmtree(artifact.directory, ignore_errors=True)

    def remove(self, key: ArtifactKey) -> None:
        if key in self._artifacts:
            self.discard(self.pop(key))

    def _load(self, directory: Path, *, whole: bool) -> None:
        try:
            artifact = ArtifactFiles.load(
                directory, public_key=self._public_key, run_id=self._run_id, whole=whole
            )
            if directory.name != directory_name(artifact.manifest.key):
                raise RefusedError(Reason.DAMAGED, f"it contains {directory_name(artifact.manifest.key)}")
        except (RefusedError, OSError) as error:
            logger.warning(
                "an artifact on disk is unusable", extra={"path": str(directory), "error": str(error)}
            )
            shutil.rmtree(directory)
            return
        known = self._artifacts.get(artifact.manifest.key)
        if known is not None:
            # Without power between the syncs of a move it is in both directories.
            if known.directory != directory:
                shutil.rmtree(directory)
            return
        self._artifacts[artifact.manifest.key] = artifact
        if artifact.is_whole and not whole:
            artifact.sync()
            artifact.move(self._complete)
        elif whole and not artifact.is_whole:
            shutil.rmtree(self._incoming / directory.name, ignore_errors=True)
            artifact.move(self._incoming)
