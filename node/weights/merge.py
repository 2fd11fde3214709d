"""A delta over many versions, made frame by frame: never more than one frame of the old words in memory.

The old words are not kept anywhere. Those of a frame are made again from the public base model (or a
keyframe) and the deltas after it, which the store has; those of the head are in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from node.errors import Reason, RefusedError
from node.weights.apply import rebuild_frame
from node.weights.chain import PUBLIC_VERSION, plan_fresh
from node.weights.codec import encode_frame
from node.weights.digests import Words, payload_digest, version_root, words_digest
from node.weights.encode import EncodedVersion
from node.weights.held import HeldPolicy
from node.weights.layout import Layout
from node.weights.manifest import FrameRecord, Manifest
from node.weights.store import ArtifactStore

FrameWords = Callable[[int], Words]
"""Gives the words of one frame of some version."""


def merge_version(
    head: HeldPolicy,
    *,
    base_version: int,
    base_frame: FrameWords,
    layout: Layout,
    run_id: str,
    learner_epoch: int,
    published_at_s: float,
    is_superseded: Callable[[], bool],
) -> EncodedVersion | None:
    """Code ``head`` against an older version; None if it is superseded before that is done.

    Args:
        base_frame: of ``base_version``; called once for each frame, in order.
        is_superseded: asked after each frame.
    """
    records, payloads = [], []
    for number, frame in enumerate(layout.frames):
        old, new = base_frame(number), head.words[frame.slice]
        coded = encode_frame(new, base=old)
        payloads.append(coded.payload)
        records.append(
            FrameRecord(
                codec=coded.codec,
                payload_bytes=len(coded.payload),
                base_digest=words_digest(old),
                new_digest=words_digest(new),
                payload_digest=payload_digest(coded.payload),
            )
        )
        if is_superseded():
            return None
    manifest = Manifest(
        run_id=run_id,
        learner_epoch=learner_epoch,
        layout_digest=layout.digest,
        version=head.version.number,
        root=head.version.root,
        base_version=base_version,
        base_root=version_root(layout.digest, (record.base_digest for record in records)),
        published_at_s=published_at_s,
        frames=tuple(records),
    )
    return EncodedVersion(manifest, tuple(payloads))


@contextmanager
def stored_version(
    store: ArtifactStore, version: int, *, layout: Layout, words0: Words
) -> Iterator[FrameWords]:
    """Make the frames of an old version available for the time of the body.

    Args:
        words0: the public base model; may be a memory map, of which a frame is read at a time.
    Raises:
        RefusedError: UNKNOWN_VERSION, if the store does not lead there; in the body, DAMAGED and others.
    """
    announcement = store.announcement()
    artifacts = () if announcement is None else announcement.artifacts
    path = () if version == PUBLIC_VERSION else plan_fresh(version, artifacts)
    if path is None:
        raise RefusedError(Reason.UNKNOWN_VERSION, f"nothing stored leads to version {version}")
    with ExitStack() as leases:
        for artifact in path:
            leases.enter_context(store.lease(artifact.key))
        manifests = [store.manifest(artifact.key)[0] for artifact in path]

        def frame_words(frame: int) -> Words:
            steps = [(manifest, store.read_payload(manifest.key, frame)) for manifest in manifests]
            is_from_public = not manifests or not manifests[0].key.is_keyframe
            start = words0[layout.frames[frame].slice] if is_from_public else None
            return rebuild_frame(frame, steps, layout=layout, start=start)

        yield frame_words
