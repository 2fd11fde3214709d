"""Words of published versions for export: from the learner's store, or kept before it forgets them.

<state>/published/complete/*                    leads to all versions since the second newest keyframe
<state>/kept/000000000042-<root in hex>.words   versions that are worth keeping, written before a keyframe
"""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from node import durable
from node.errors import RefusedError
from node.weights.assembly.encode import FrameWords
from node.weights.assembly.stored import StoredVersions, rebuild_frame
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import SIGNATURE_BYTES, Manifest, parse
from node.weights.planning.cheapest_chain import newest_reachable, plan_fresh

logger = logging.getLogger(__name__)

PUBLISHED, KEPT = "published", "kept"
"""Directories of a learner's state."""

_SUFFIX: Final = ".words"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Versions worth keeping."""

    versions: Collection[int]
    is_all: bool = True
    """Whether nothing else is. False: the coordinator has not said yet what it finds worth keeping, and
    nothing is removed."""


class KeptVersions:
    """Keeps the words of some versions when the store is about to forget others."""

    def __init__(self, directory: Path, stored: StoredVersions, *, wanted: Callable[[], Wanted]) -> None:
        """Keep in ``directory``; ``wanted`` returns the versions worth keeping. Any thread."""
        self._directory = directory
        self._stored = stored
        self._wanted = wanted

    def secure(self) -> None:
        """Write down what is wanted and not there yet; remove what is wanted no more. Blocking.

        A version that the store does not lead to any more is logged and left out.

        Raises:
            OSError: the disk is full or failing.
        """
        said = self._wanted()
        wanted = {version for version in said.versions if version > 0}
        there = dict(_kept_in(self._directory))
        for version in sorted(wanted - there.keys()):
            try:
                with self._stored.opened(version) as stored:
                    self._write(version, stored.words)
            except RefusedError as refused:
                logger.warning("version not kept", extra={"version": version, "detail": str(refused)})
        for version in there.keys() - wanted if said.is_all else ():
            there[version].unlink(missing_ok=True)

    def _write(self, version: int, frame_words: FrameWords) -> None:
        durable.make_directory(self._directory)
        digests, layout, staged = [], self._stored.layout, self._directory / f"{version:012d}"
        with durable.replacing(staged) as file:
            for frame in range(len(layout.frames)):
                words = frame_words(frame)
                digests.append(words_digest(words))
                file.write(words.data)
        root = version_root(layout.digest, digests).hex()
        durable.rename(staged, self._directory / f"{version:012d}-{root}{_SUFFIX}")


def published_versions(state: Path) -> list[int]:
    """Return the versions whose published words a learner's state directory has, ascending."""
    manifests = [manifest for manifest, _ in _manifests(state / PUBLISHED / "complete")]
    artifacts = [manifest.artifact for manifest in manifests]
    reachable = {
        number
        for number in {manifest.version for manifest in manifests}
        if newest_reachable([one for one in artifacts if one.key.version <= number]) == number
    }
    return sorted(reachable | {version for version, _ in _kept_in(state / KEPT)})


@dataclass(frozen=True, slots=True, eq=False)
class PublishedWords:
    """The words of a published version, a frame at a time."""

    frame: FrameWords
    root: bytes
    """The root that they were published with, and have if they are whole."""


@contextmanager
def opened_published(
    state: Path, version: int, *, layout: Layout, base: FrameWords
) -> Iterator[PublishedWords | None]:
    """Yield the published words of a version; None: they are not there. The learner may be running.

    Args:
        base: returns a frame of the base model's words.
    Raises:
        OSError: the learner removed a file meanwhile: try again.
        RefusedError: a file is damaged, or of another model; the frames raise it too.
        ValueError: the file has another size than the words.
    """
    if (path := dict(_kept_in(state / KEPT)).get(version)) is not None:
        words = np.memmap(path, np.uint16, "r")
        if words.shape != (layout.words,):
            raise ValueError(f"{path} has {len(words)} words, the model {layout.words}")
        root = bytes.fromhex(path.name.removesuffix(_SUFFIX).partition("-")[2])
        yield PublishedWords(lambda frame: words[layout.frames[frame].slice], root)
        return
    found = {manifest.key: (manifest, path) for manifest, path in _manifests(state / PUBLISHED / "complete")}
    chain = plan_fresh(version, [manifest.artifact for manifest, _ in found.values()])
    if not chain:
        yield None
        return
    with ExitStack() as stack:
        steps = []
        for artifact in chain:
            manifest, path = found[artifact.key]
            manifest.check_layout(layout)
            # What is open stays readable when its name is removed.
            steps.append((manifest, stack.enter_context((path / "frames").open("rb")), _offsets(manifest)))

        def rebuilt(frame: int) -> Words:
            way = [(manifest, _payload(manifest, file, offsets, frame)) for manifest, file, offsets in steps]
            start = None if chain[0].key.is_keyframe else base(frame)
            return rebuild_frame(frame, way, layout=layout, start=start)

        yield PublishedWords(rebuilt, found[chain[-1].key][0].policy_version.root)


def _kept_in(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in directory.glob(f"*-*{_SUFFIX}") if directory.is_dir() else ():
        number = path.name.partition("-")[0]
        if number.isdecimal():
            yield int(number), path


def _manifests(directory: Path) -> Iterator[tuple[Manifest, Path]]:
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        with suppress(OSError, RefusedError):  # removed meanwhile, or of no use
            yield parse((path / "manifest").read_bytes()[:-SIGNATURE_BYTES]), path


def _offsets(manifest: Manifest) -> list[int]:
    sizes = [frame.payload_bytes for frame in manifest.frames]
    return [0, *np.cumsum(sizes).tolist()]


def _payload(manifest: Manifest, file: BinaryIO, offsets: list[int], frame: int) -> bytes:
    file.seek(offsets[frame])
    return file.read(manifest.frames[frame].payload_bytes)
