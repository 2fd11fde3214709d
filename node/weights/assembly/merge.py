"""Makes a delta over many versions, with at most one frame of the old words in memory.

The old words are not kept. Those of a frame are rebuilt from the public base model (or a keyframe) and the
deltas after it, which the store has. Those of the head are in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from node.errors import Reason, RefusedError
from node.policy import PolicyVersion
from node.weights.assembly.apply import make_frame
from node.weights.assembly.encode import CodedFrame, FrameWords, code_frames, join
from node.weights.assembly.held import HeldPolicy
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_fresh
from node.weights.store.artifact_store import ArtifactStore


def merge_version(
    head: HeldPolicy,
    *,
    base_version: int,
    base_frame: FrameWords,
    layout: Layout,
    run_id: str,
    learner_epoch: int,
    published_at_s: float,
    put: Callable[[bytes], object],
    is_superseded: Callable[[], bool],
) -> Manifest | None:
    """Code ``head`` against an older version; return None if it is superseded before that is done.

    Args:
        base_frame: of ``base_version``; called once for each frame, in order.
        put: takes the payloads, in order.
        is_superseded: asked after each frame.
    Raises RefusedError: DAMAGED: the words of ``head`` have changed in memory; and whatever ``base_frame``
    and ``put`` raise.
    """
    # The base root is computed from the words coded against. If they are not those of the version after all,
    # no receiver has this base, and none starts from it.
    base_digests: list[int] = []

    def base(frame: int) -> Words:
        words = base_frame(frame)
        base_digests.append(words_digest(words))
        return words

    coded: list[CodedFrame] = []
    for frame in range(len(layout.frames)):
        coded += code_frames(
            [frame],
            new=head.frame_words(layout),
            base=base,
            layout=layout,
            put=put,
            executor=None,
            under_way=1,
        )
        if is_superseded():
            return None
    manifest = join(
        coded,
        version=head.version.number,
        base=PolicyVersion(base_version, version_root(layout.digest, base_digests)),
        layout=layout,
        run_id=run_id,
        learner_epoch=learner_epoch,
        published_at_s=published_at_s,
    )
    if manifest.policy_version != head.version:
        raise RefusedError(Reason.DAMAGED, f"the words of version {head.version.number} changed in memory")
    return manifest


@contextmanager
def stored_version(
    store: ArtifactStore, version: int, *, layout: Layout, words0: Words
) -> Iterator[FrameWords]:
    """Yield a function that rebuilds frames of an old version, whose artifacts stay for the time of the body.

    Args:
        words0: the public base model; may be a memory map, of which a frame is read at a time.
    Raises RefusedError: UNKNOWN_VERSION: nothing stored leads there; in the body, DAMAGED and others.
    """
    announcement = store.announcement()
    artifacts = () if announcement is None else announcement.artifacts
    path = () if version == PUBLIC_VERSION else plan_fresh(version, artifacts)
    if path is None:
        raise RefusedError(Reason.UNKNOWN_VERSION, f"no stored artifacts lead to version {version}")
    with ExitStack() as leases:
        for artifact in path:
            leases.enter_context(store.lease(artifact.key))
        manifests = [store.manifest(artifact.key) for artifact in path]

        def frame_words(frame: int) -> Words:
            steps = [(manifest, store.read_payload(manifest.key, frame)) for manifest in manifests]
            is_from_public = not manifests or not manifests[0].key.is_keyframe
            start = words0[layout.frames[frame].slice] if is_from_public else None
            return rebuild_frame(frame, steps, layout=layout, start=start)

        yield frame_words


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
