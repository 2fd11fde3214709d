"""One artifact on disk: a directory with its signed manifest and its payloads, one after the other.

    <directory>/manifest    as signed
    <directory>/frames      payload i at the sum of the sizes before it

No file says which frames are present: after a crash every payload is hashed again, so no journal can
disagree with the data.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from node.errors import Reason, RefusedError
from node.system import durable
from node.values.policy import ArtifactKey
from node.weights.format.manifest import Manifest, verify_signed

logger = logging.getLogger(__name__)

_MANIFEST = "manifest"
_FRAMES = "frames"
_BEING_MADE = "a version that is being made"


class Draft:
    """The payloads of an artifact being made here, in order; its manifest comes last."""

    def __init__(self, parent: Path) -> None:
        """Create an empty file in the directory ``parent``. Raises RefusedError: DISK."""
        with _cannot_be_stored(_BEING_MADE):
            descriptor, name = tempfile.mkstemp(prefix="draft-", dir=parent)
        self._file = os.fdopen(descriptor, "wb")
        self.path = Path(name)
        self.size_bytes = 0

    def append(self, payload: bytes) -> None:
        """Write the payload of the next frame. Raises RefusedError: DISK."""
        with _cannot_be_stored(_BEING_MADE):
            self._file.write(payload)
        self.size_bytes += len(payload)

    def finish(self) -> None:
        """Flush and close the file; nothing can be appended any more. Raises RefusedError: DISK."""
        with _cannot_be_stored(_BEING_MADE):
            self._file.close()

    def reopen(self) -> BinaryIO:
        """Finish, and return the payloads to be read from the first on. Raises RefusedError: DISK."""
        self.finish()
        return self.path.open("rb")

    def close(self) -> None:
        """Remove the file, unless it became an artifact."""
        with suppress(OSError):  # What a full disk did not take is thrown away here.
            self._file.close()
        self.path.unlink(missing_ok=True)


class ArtifactFiles:
    """Reads and writes one artifact. The store serialises the calls."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        sizes = np.fromiter((frame.payload_bytes for frame in manifest.frames), np.int64)
        self._offsets = np.cumsum(sizes) - sizes
        self._present = sizes == 0
        self.is_quarantined = False
        """It was complete, and waits for a frame that was damaged."""

    @classmethod
    def create(cls, directory: Path, manifest: Manifest) -> "ArtifactFiles":
        """Create the directory with its manifest. Both are on disk when this returns."""
        shutil.rmtree(directory, ignore_errors=True)  # What a full disk left of an earlier attempt.
        directory.mkdir()
        (directory / _FRAMES).touch()
        durable.write(directory / _MANIFEST, manifest.signed)
        return cls(directory, manifest)

    @classmethod
    def load(cls, directory: Path, *, public_key: bytes, run_id: str, whole: bool) -> "ArtifactFiles":
        """Load what an earlier process left.

        Args:
            whole: the artifact was complete: its frames are hashed when they are read. Otherwise they
                are hashed now.
        Raises RefusedError: the manifest is damaged, or of another run. OSError: a file cannot be read.
        """
        signed = (directory / _MANIFEST).read_bytes()
        artifact = cls(directory, verify_signed(signed, public_key=public_key, run_id=run_id))
        with (directory / _FRAMES).open("rb") as file:
            if whole and os.fstat(file.fileno()).st_size == artifact.manifest.size_bytes:
                artifact._present[:] = True
            else:
                for frame, record in enumerate(artifact.manifest.frames):
                    artifact._present[frame] = record.is_payload(artifact._pread(file.fileno(), frame))
        return artifact

    @property
    def is_whole(self) -> bool:
        return bool(self._present.all())

    def has(self, frame: int) -> bool:
        return bool(self._present[frame])

    def missing(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(~self._present).tolist())

    def open(self) -> BinaryIO | None:
        """Open the payloads, which stay readable wherever the directory is moved; None: they are gone."""
        try:
            return (self.directory / _FRAMES).open("rb", buffering=0)
        except FileNotFoundError:
            return None
        except OSError as error:  # this process's own fault, such as too many open files; the version stays
            logger.warning("artifact not opened", extra={"path": str(self.directory), "error": str(error)})
            return None

    def read(self, file: BinaryIO, frame: int, *, verifies: bool) -> bytes | None:
        """Return the payload of a frame and close ``file``; None: it is cut short, or fails its digest.

        Args:
            verifies: compare it with its digest. Otherwise whoever gets it does.
        """
        with file:
            try:
                payload = self._pread(file.fileno(), frame)
            except OSError:
                return None
        record = self.manifest.frames[frame]
        is_right = record.is_payload(payload) if verifies else len(payload) == record.payload_bytes
        return payload if is_right else None

    def write(self, frame: int, payload: bytes) -> None:
        """Write the payload of a frame, which was verified. It survives a crash once ``sync`` has returned.

        Raises RefusedError: DISK.
        """
        with _cannot_be_stored(f"frame {frame} of version {self.manifest.version}"):
            descriptor = os.open(self.directory / _FRAMES, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                written, offset = 0, int(self._offsets[frame])
                while written < len(payload):
                    written += os.pwrite(descriptor, memoryview(payload)[written:], offset + written)
            finally:
                os.close(descriptor)
        self._present[frame] = True

    def adopt(self, draft: Draft) -> None:
        """Adopt the payloads of a draft. They survive a crash once ``sync`` has returned.

        Raises ValueError: they are not of the size that the manifest says. OSError: they could not be moved.
        """
        if draft.size_bytes != self.manifest.size_bytes:
            raise ValueError(
                f"the draft has {draft.size_bytes} bytes, its manifest says {self.manifest.size_bytes}"
            )
        durable.rename(draft.path, self.directory / _FRAMES)
        self._present[:] = True

    def move(self, parent: Path) -> None:
        """Move the directory into ``parent``. The move survives a crash when this returns."""
        source, target = self.directory, parent / self.directory.name
        try:
            durable.rename(source, target)
        finally:
            if not source.exists():  # What can fail after the rename is a sync.
                self.directory = target

    def forget(self, frame: int) -> None:
        self._present[frame] = False

    def sync(self) -> None:
        durable.sync(self.directory / _FRAMES)

    def _pread(self, descriptor: int, frame: int) -> bytes:
        return os.pread(descriptor, self.manifest.frames[frame].payload_bytes, int(self._offsets[frame]))


def directory_name(key: ArtifactKey) -> str:
    return f"{key.version}-{'key' if key.is_keyframe else key.base_version}"


@contextmanager
def disk_errors_refused(key: ArtifactKey) -> Iterator[None]:
    """Turn an OSError of the body into RefusedError: DISK, which names the artifact."""
    with _cannot_be_stored(f"version {key.version} from {key.base_version}"):
        yield


@contextmanager
def _cannot_be_stored(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RefusedError(
            Reason.DISK,
            f"{what} cannot be stored: {error.strerror}",
            fix=durable.disk_fix(error, disk="the disk of the state directory"),
        ) from error
