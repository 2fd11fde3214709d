"""Decides which artifacts are kept: enough for late joiners and for peers a little behind, no more; pure."""

from collections.abc import Iterable, Set

from node.policy import Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_fresh


def surplus(complete: Iterable[Artifact], *, head: int | None, retained_keyframes: int) -> Set[ArtifactKey]:
    """Return the complete artifacts that may be removed.

    Kept are the newest ``retained_keyframes`` keyframes, everything that starts at or after the oldest
    of them, and as many of the newest deltas from the public base model. Until there are that many
    keyframes, everything is kept. If none of this leads to ``head``, the cheapest chain there is kept too.
    """
    artifacts = tuple(complete)
    oldest = _oldest_kept((artifact.key for artifact in artifacts), retained_keyframes=retained_keyframes)
    kept = [artifact for artifact in artifacts if _start(artifact.key) >= oldest]
    kept += newest_from_public(artifacts, retained_keyframes, oldest=oldest)
    if head is not None and plan_fresh(head, kept) is None:
        kept += plan_fresh(head, artifacts) or ()
    return {artifact.key for artifact in artifacts} - {artifact.key for artifact in kept}


def newest_from_public(artifacts: Iterable[Artifact], count: int, *, oldest: int) -> list[Artifact]:
    """Return the ``count`` newest deltas from the public base model to ``oldest`` or a later version."""
    from_public = [a for a in artifacts if a.key.base_version == PUBLIC_VERSION and a.key.version >= oldest]
    return sorted(from_public, key=lambda artifact: artifact.key)[-count:]


def _oldest_kept(complete: Iterable[ArtifactKey], *, retained_keyframes: int) -> int:
    """Return the oldest version a kept artifact may start from; 0 while there are too few keyframes."""
    keyframes = sorted((key.version for key in complete if key.is_keyframe), reverse=True)
    return keyframes[retained_keyframes - 1] if len(keyframes) >= retained_keyframes else 0


def _start(key: ArtifactKey) -> int:
    return key.version if key.is_keyframe else key.base_version
