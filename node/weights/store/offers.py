"""Decides which artifacts a store accepts, given those it has and the head it announced, and keeps; pure."""

from collections.abc import Iterable, Set

from node.errors import Reason, RefusedError
from node.values.policy import Artifact, ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.planning.cheapest_chain import PUBLIC_VERSION, plan_fresh, start_of
from node.weights.store.high_water import HighWater


def admit_offer(offer: Manifest, *, retained: Iterable[Manifest], mark: HighWater) -> frozenset[ArtifactKey]:
    """Return the retained artifacts that ``offer`` makes worthless; usually none.

    What is known of the offer's version number decides: from manifests of that version, from manifests
    that start from it, and from the announced head.

        the same root       accepted, whatever its epoch: these are the same words again
        another root        a fork; accepted only if that version was never announced and every
                            manifest that names it is of an older epoch
        nothing             accepted if it is neither of an older epoch nor behind the head

    The signature is verified; ``retained`` is every artifact of the store, complete or not.

    Raises RefusedError: FENCED or ROLLBACK.
    """
    epochs_of_others: dict[ArtifactKey, int] = {}
    is_known = mark.head is not None and mark.head.policy_version == offer.policy_version
    for manifest in retained:
        for number, root in (
            (manifest.version, manifest.root),
            (manifest.base_version, manifest.base_root),
        ):
            if number == offer.version:
                is_known |= root == offer.root
                if root != offer.root:
                    epochs_of_others[manifest.key] = manifest.learner_epoch
    if not epochs_of_others:
        if not is_known:
            mark.check(learner_epoch=offer.learner_epoch, version=offer.policy_version)
        return frozenset()
    newest_other = max(epochs_of_others.values())
    if offer.learner_epoch < newest_other:
        raise RefusedError(
            Reason.FENCED,
            f"version {offer.version} of learner epoch {offer.learner_epoch} has another root "
            f"than that of epoch {newest_other}",
            fix="stop the older learner",
        )
    is_public = mark.head is not None and offer.version <= mark.head.number
    if is_public or offer.learner_epoch == newest_other:
        raise RefusedError(
            Reason.ROLLBACK,
            f"version {offer.version} was published with another root than {offer.root.hex()}",
            fix="restore the newest copy of the learner's state directory",
        )
    return frozenset(epochs_of_others)


def is_behind(key: ArtifactKey, *, retained: Iterable[ArtifactKey], newest: int | None) -> bool:
    """Return whether a store can only refuse an artifact: older than the head, and nothing vouches for it.

    Args:
        retained: what the store has and what it was offered before this one; a manifest that names a version,
            as its own or its base, has its root.
        newest: the head that the store announced; None: none yet.
    """
    if newest is None or key.version >= newest:
        return False
    return all(key.version not in (other.version, other.base_version) for other in retained)


def takeable(
    offers: Iterable[ArtifactKey], *, retained: Iterable[ArtifactKey], newest: int | None
) -> frozenset[ArtifactKey]:
    """Return the offers that a store does not refuse as ``is_behind``, if they come newest first."""
    vouching = list(retained)
    taken = []
    for key in sorted(offers, reverse=True):
        if not is_behind(key, retained=vouching, newest=newest):
            vouching.append(key)
            taken.append(key)
    return frozenset(taken)


def surplus(
    complete: Iterable[Artifact], *, wanted: Iterable[int | None], retained_keyframes: int
) -> Set[ArtifactKey]:
    """Return the complete artifacts that may be removed.

    Kept are the newest ``retained_keyframes`` keyframes, everything that starts at or after the oldest
    of them, and as many of the newest deltas from the public base model. Until there are that many
    keyframes, everything is kept. If none of this leads to one of the ``wanted`` versions, the cheapest chain
    there is kept too.
    """
    artifacts = tuple(complete)
    keyframes = sorted(
        (artifact.key.version for artifact in artifacts if artifact.key.is_keyframe), reverse=True
    )
    oldest = keyframes[retained_keyframes - 1] if len(keyframes) >= retained_keyframes else 0
    kept = [artifact for artifact in artifacts if start_of(artifact.key) >= oldest]
    from_public = [a for a in artifacts if a.key.base_version == PUBLIC_VERSION and a.key.version >= oldest]
    kept += sorted(from_public, key=lambda artifact: artifact.key)[-retained_keyframes:]
    for version in wanted:
        if version is not None and plan_fresh(version, kept) is None:
            kept += plan_fresh(version, artifacts) or ()
    return {artifact.key for artifact in artifacts} - {artifact.key for artifact in kept}
