"""Codes a delta over many versions, frame by frame: an old version's words, rebuilt, against the head's."""

from collections.abc import Sequence
from dataclasses import dataclass

from node.errors import Reason, RefusedError
from node.values.policy import PolicyVersion
from node.weights.assembly.encode import CodedFrame, code_frame, join
from node.weights.format.digests import Words, version_root, words_digest
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class MergedFrame:
    """A coded frame, and what it was coded against."""

    coded: CodedFrame
    base_digest: int
    """``words_digest`` of the old words."""


def merge_frame(frame: int, *, new: Words, old: Words, layout: Layout) -> tuple[MergedFrame, bytes]:
    """Code a frame of the head against its words in an older version; return it with its payload.

    Raises RefusedError: as ``code_frames``.
    """
    coded, payload = code_frame(frame, new=lambda _: new, base=lambda _: old, layout=layout)
    return MergedFrame(coded, words_digest(old)), payload


def join_merged(
    merged: Sequence[MergedFrame],
    *,
    head: PolicyVersion,
    base_version: int,
    layout: Layout,
    run_id: str,
    learner_epoch: int,
    published_at_s: float,
) -> Manifest:
    """Return the manifest of all frames of the layout, in order.

    The base root is made of the words coded against. If they are not those of the version after all, no
    receiver has this base, and none starts from it.

    Raises RefusedError: DAMAGED: the words that were coded are not those of ``head``. ValueError: frames are
    missing.
    """
    base_root = version_root(layout.digest, [frame.base_digest for frame in merged])
    manifest = join(
        [frame.coded for frame in merged],
        version=head.number,
        base=PolicyVersion(base_version, base_root),
        layout=layout,
        run_id=run_id,
        learner_epoch=learner_epoch,
        published_at_s=published_at_s,
    )
    if manifest.policy_version != head:
        raise RefusedError(Reason.DAMAGED, f"the words of version {head.number} changed in memory")
    return manifest
