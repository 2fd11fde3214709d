"""The published versions that a learner's store leads to, for export and rollback; and which it keeps.

<state>/published/complete/*    leads to all versions since the second newest keyframe, and to those that are
                                pinned: worth keeping, or some of the older keyframes

Versions are pinned before a keyframe makes the store forget some.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from learner.publishing.spaced_versions import Spacing
from node.errors import RefusedError
from node.values.policy import Artifact
from node.weights.assembly.encode import FrameWords
from node.weights.assembly.stored import rebuild_frame
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.manifest import SIGNATURE_BYTES, Manifest, parse
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, newest_reachable, plan_fresh
from node.weights.store.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)

PUBLISHED: Final = "published"
"""Directory of a learner's state."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Versions worth keeping."""

    versions: Collection[int]
    is_all: bool = True
    """Whether nothing else is. False: the coordinator has not said yet what it finds worth keeping, and
    nothing is removed."""


class KeptVersions:
    """Pins versions when the store is about to forget others."""

    def __init__(self, store: ArtifactStore, *, wanted: Callable[[], Wanted], spacing: Spacing) -> None:
        """Pin versions of ``store``. Any thread.

        Args:
            wanted: returns the versions worth keeping.
            spacing: names keyframes besides, for a rollback that reaches far back.
        """
        self._store = store
        self._wanted = wanted
        self._spacing = spacing

    def secure(self) -> None:
        """Pin what is wanted, and nothing else. Blocking.

        A version that the store does not lead to any more is logged and left out.

        Raises:
            OSError: the disk is full or failing.
        """
        said = self._wanted()
        artifacts = [manifest.artifact for manifest in self._store.whole()]
        led_to = reachable_versions(artifacts)
        wanted = {version for version in said.versions if version > 0}
        if gone := sorted(wanted - led_to):
            logger.warning("versions not kept", extra={"versions": gone})
        keyframes = {artifact.key.version for artifact in artifacts if artifact.key.is_keyframe}
        # The newest version is what ages count from.
        spaced = self._spacing.chosen({*keyframes, max(led_to)}) if led_to else frozenset()
        before = frozenset[int]() if said.is_all else self._store.pinned
        self._store.pin((wanted | spaced | before) & led_to)


def was_skipped(version: int, store: ArtifactStore) -> bool:
    """Whether a version was made and not published, as far as the store still tells.

    Nobody can have drawn from it. The store has every version since the oldest keyframe that it announces; an
    empty one was lost.
    """
    announced = store.announcement()
    if announced is None:
        return False
    keys = [artifact.key for artifact in announced.artifacts]
    oldest = min((key.version for key in keys if key.is_keyframe), default=PUBLIC_VERSION)
    # A damaged one is not announced until it is mended.
    return version > oldest and all(key.version != version for key in (*keys, *store.retained()))


def published_versions(state: Path) -> list[int]:
    """Return the versions whose published words a learner's state directory has, ascending."""
    manifests = [manifest for manifest, _ in _manifests(state / PUBLISHED / "complete")]
    return sorted(reachable_versions([manifest.artifact for manifest in manifests]))


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
    """
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
