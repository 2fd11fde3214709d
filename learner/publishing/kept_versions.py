"""Words of published versions for export: from the learner's store, or kept before it forgets them.

<state>/published/complete/*                    leads to all versions since the second newest keyframe
<state>/kept/000000000042-<root in hex>.words   versions that are worth keeping, and some of the older ones,
                                                written before a keyframe
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from learner.publishing.spaced_versions import Spacing
from node import durable
from node.errors import RefusedError
from node.policy import Artifact
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


class KeptVersions:
    """Keeps the words of some versions when the store is about to forget others."""

    def __init__(
        self,
        directory: Path,
        stored: StoredVersions,
        *,
        wanted: Callable[[], Collection[int]],
        spacing: Spacing,
    ) -> None:
        """Keep in ``directory``. Any thread.

        Args:
            wanted: returns the versions worth keeping.
            spacing: names others, for a rollback that reaches far back.
        """
        self._directory = directory
        self._stored = stored
        self._wanted = wanted
        self._spacing = spacing

    def secure(self) -> None:
        """Write down what is wanted and not there yet; remove what is wanted no more. Blocking.

        A version that the store does not lead to any more is logged and left out; so is one that only the
        spacing asks for where the disk is full.

        Raises:
            OSError: the disk is full or failing.
        """
        wanted = {version for version in self._wanted() if version > 0}
        there = dict(_kept_in(self._directory))
        announcement = self._stored.store.announcement()
        led_to = () if announcement is None else reachable_versions(announcement.artifacts)
        spaced = self._spacing.chosen({*there, *led_to})
        for version in there.keys() - wanted - spaced:  # first: they make room
            there[version].unlink(missing_ok=True)
        for version in sorted((wanted | spaced) - there.keys()):
            try:
                with self._stored.opened(version) as stored:
                    self._write(version, stored.words)
            except RefusedError as refused:
                logger.warning("version not kept", extra={"version": version, "detail": str(refused)})
            except OSError as error:
                if version in wanted:
                    raise
                logger.warning("version not kept", extra={"version": version, "detail": str(error)})

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
    reachable = reachable_versions([manifest.artifact for manifest in manifests])
    return sorted(reachable | {version for version, _ in _kept_in(state / KEPT)})


def reachable_versions(artifacts: Sequence[Artifact]) -> set[int]:
    """Return the versions that artifacts lead to from a keyframe or the base model."""
    return {
        number
        for number in {artifact.key.version for artifact in artifacts}
        if newest_reachable([one for one in artifacts if one.key.version <= number]) == number
    }


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
