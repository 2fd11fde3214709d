"""Old versions, rebuilt a frame at a time from the artifacts in a store.

    public base model, or a keyframe --delta--> ... --delta--> the version

Nobody keeps the words of old versions, and no more than one frame of them is in memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from node.errors import Reason, RefusedError
from node.weights.assembly.apply import make_frame
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_catch_up
from node.weights.store.artifact_store import ArtifactStore


@dataclass(frozen=True, slots=True, eq=False)
class StoredVersions:
    """The versions that a store leads to."""

    store: ArtifactStore
    layout: Layout
    words0: Words
    """The public base model; may be a memory map, of which a frame is read at a time."""

    @contextmanager
    def opened(self, version: int, *, held: int = PUBLIC_VERSION) -> Iterator["StoredVersion"]:
        """Yield the cheapest way to a version, whose artifacts stay for the time of the body.

        Args:
            held: a version whose words the caller has, from which the way may start.
        Raises RefusedError: UNKNOWN_VERSION: nothing stored leads there.
        """
        artifacts = [manifest.artifact for manifest in self.store.whole()]
        path = plan_catch_up(held, version, artifacts)
        if path is None:
            raise RefusedError(Reason.UNKNOWN_VERSION, f"no stored artifacts lead to version {version}")
        with ExitStack() as leases:
            for artifact in path:
                leases.enter_context(self.store.lease(artifact.key))
            yield StoredVersion(self, tuple(self.store.manifest(artifact.key) for artifact in path))


@dataclass(frozen=True, slots=True, eq=False)
class StoredVersion:
    """The way to a version: where its words start, and the artifacts after that."""

    of: StoredVersions
    manifests: tuple[Manifest, ...]
    """Verified, each starting from the version before it."""

    def start(self, frame: int) -> Words | None:
        """Return a frame's words where the artifacts start from; None: the first one is a keyframe."""
        is_from_public = not self.manifests or not self.manifests[0].key.is_keyframe
        return self.of.words0[self.of.layout.frames[frame].slice] if is_from_public else None

    def payloads(self, frame: int) -> list[bytes]:
        """Return a frame's payload in each artifact. Raises RefusedError: as the store's ``read_payload``."""
        return [self.of.store.read_payload(manifest.key, frame) for manifest in self.manifests]

    def words(self, frame: int) -> Words:
        """Return a frame's words. Raises RefusedError: as ``payloads`` and ``rebuild_frame``."""
        steps = list(zip(self.manifests, self.payloads(frame), strict=True))
        return rebuild_frame(frame, steps, layout=self.of.layout, start=self.start(frame))


def rebuild_frame(
    frame: int, steps: Sequence[tuple[Manifest, bytes]], *, layout: Layout, start: Words | None = None
) -> Words:
    """Return the words of one frame, made from a keyframe (or from ``start``) and the deltas after it.

    Args:
        steps: verified manifests, each starting from the version before it, with this frame's payload.
        start: the frame's words in the version the first step starts from; None for a keyframe.
    Raises DamagedFrameError: a payload is not the signed one, or does not make the signed words.
    WrongBaseError: the steps do not follow from each other in this frame.
    """
    span, words = layout.frames[frame], start
    for manifest, payload in steps:
        out = np.empty(span.words, np.uint16)
        make_frame(frame, manifest, payload, base=words, out=out, dtype=span.dtype)
        words = out
    if words is None:
        raise ValueError("a frame cannot be rebuilt from nothing")
    return words
