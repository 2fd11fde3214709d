"""One artifact on disk: a directory with its signed manifest and its payloads, one after the other.

    <directory>/manifest    as signed
    <directory>/frames      payload i at the sum of the sizes before it

Which frames are there is not written down: after a crash every payload is hashed again, so that
no journal can disagree with the data.
"""

import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from node.errors import Reason, RefusedError
from node.weights.digests import payload_digest
from node.weights.manifest import Manifest, verify_signed

_MANIFEST = "manifest"
_FRAMES = "frames"


class ArtifactFiles:
    """Reads and writes one artifact. The store moves its directory and serialises who calls what."""

    def __init__(self, directory: Path, signed: bytes, manifest: Manifest) -> None:
        self.directory = directory
        self.signed = signed
        self.manifest = manifest
        sizes = np.fromiter((frame.payload_bytes for frame in manifest.frames), np.int64)
        self._offsets = np.cumsum(sizes) - sizes
        self._present = sizes == 0

    @classmethod
    def create(cls, directory: Path, signed: bytes, manifest: Manifest) -> "ArtifactFiles":
        """Make the directory with its manifest, on disk before this returns."""
        shutil.rmtree(directory, ignore_errors=True)  # What a full disk left of an earlier attempt.
        directory.mkdir()
        with (directory / _MANIFEST).open("xb") as file:
            file.write(signed)
            file.flush()
            os.fsync(file.fileno())
        (directory / _FRAMES).touch()
        sync_directory(directory)
        return cls(directory, signed, manifest)

    @classmethod
    def load(cls, directory: Path, *, public_key: bytes, run_id: str, whole: bool) -> "ArtifactFiles":
        """Read what an earlier process left.

        Args:
            whole: the directory was complete, so that its frames are hashed when they are read;
                otherwise they are hashed now.
        Raises:
            RefusedError: the manifest is not what it was.
            OSError: a file cannot be read.
        """
        signed = (directory / _MANIFEST).read_bytes()
        artifact = cls(directory, signed, verify_signed(signed, public_key=public_key, run_id=run_id))
        with (directory / _FRAMES).open("rb") as file:
            if whole and os.fstat(file.fileno()).st_size == artifact.manifest.size_bytes:
                artifact._present[:] = True
            else:
                for frame in range(len(artifact.manifest.frames)):
                    artifact._present[frame] = artifact._is_intact(
                        frame, artifact._pread(file.fileno(), frame)
                    )
        return artifact

    @property
    def is_whole(self) -> bool:
        return bool(self._present.all())

    def has(self, frame: int) -> bool:
        return bool(self._present[frame])

    def missing(self) -> tuple[int, ...]:
        """Give the frames whose payload is not here."""
        return tuple(np.flatnonzero(~self._present).tolist())

    def open(self) -> BinaryIO | None:
        """Give the payloads to read from, wherever the directory goes meanwhile; None if they are gone."""
        try:
            return (self.directory / _FRAMES).open("rb", buffering=0)
        except OSError:
            return None

    def read(self, file: BinaryIO, frame: int) -> bytes | None:
        """Give the payload of a frame, and close; None if its bytes are not what was written."""
        with file:
            try:
                payload = self._pread(file.fileno(), frame)
            except OSError:
                return None
        return payload if self._is_intact(frame, payload) else None

    def write(self, frame: int, payload: bytes) -> None:
        """Write the payload of a frame; it survives a crash only once ``sync`` returned.

        Raises:
            RefusedError: DAMAGED, if it is not the payload that was signed; DISK, if it cannot be written.
        """
        if not self._is_intact(frame, payload):
            raise RefusedError(
                Reason.DAMAGED,
                f"frame {frame} of version {self.manifest.version} came with another digest than signed",
                fix="send this frame again",
            )
        try:
            descriptor = os.open(self.directory / _FRAMES, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written, offset = 0, int(self._offsets[frame])
                while written < len(payload):
                    written += os.pwrite(descriptor, memoryview(payload)[written:], offset + written)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RefusedError(
                Reason.DISK,
                f"frame {frame} of version {self.manifest.version} cannot be stored: {error.strerror}",
                fix="make room on the disk of the state directory",
            ) from error
        self._present[frame] = True

    def forget(self, frame: int) -> None:
        """Count a frame as missing from now on."""
        self._present[frame] = False

    def sync(self) -> None:
        """Return when the payloads are on disk."""
        descriptor = os.open(self.directory / _FRAMES, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _pread(self, descriptor: int, frame: int) -> bytes:
        return os.pread(descriptor, self.manifest.frames[frame].payload_bytes, int(self._offsets[frame]))

    def _is_intact(self, frame: int, payload: bytes) -> bool:
        record = self.manifest.frames[frame]
        return len(payload) == record.payload_bytes and payload_digest(payload) == record.payload_digest


def make_directory(directory: Path) -> None:
    """Make a directory, with its parents, that is there after a crash; one that is there is left alone."""
    if not directory.exists():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Return when what was created, renamed or removed in ``directory`` is on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
