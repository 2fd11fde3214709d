"""Which artifacts are kept: enough for a late joiner and for a peer that is a little behind, no more."""

from collections.abc import Iterable, Set

from node.policy import Artifact, ArtifactKey
from node.weights.chain import plan_fresh


def surplus(complete: Iterable[Artifact], *, head: int | None, retained_keyframes: int) -> Set[ArtifactKey]:
    """Give the complete artifacts that may go.

    Kept are the newest ``retained_keyframes`` keyframes and everything that starts at or after the
    oldest of them; until there are that many, everything; and if that does not lead to ``head``,
    the cheapest way there.
    """
    artifacts = tuple(complete)
    oldest = _oldest_kept((artifact.key for artifact in artifacts), retained_keyframes=retained_keyframes)
    kept = [artifact for artifact in artifacts if _start(artifact.key) >= oldest]
    if head is not None and plan_fresh(head, kept) is None:
        kept += plan_fresh(head, artifacts) or ()
    return {artifact.key for artifact in artifacts} - {artifact.key for artifact in kept}


def _oldest_kept(complete: Iterable[ArtifactKey], *, retained_keyframes: int) -> int:
    """Give the version before which nothing has to start; 0 while there are too few keyframes."""
    keyframes = sorted((key.version for key in complete if key.is_keyframe), reverse=True)
    return keyframes[retained_keyframes - 1] if len(keyframes) >= retained_keyframes else 0


def _start(key: ArtifactKey) -> int:
    return key.version if key.is_keyframe else key.base_version
