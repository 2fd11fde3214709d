"""Decides which offered artifacts a store accepts, given those it has and the head it announced; pure."""

from collections.abc import Iterable

from node.errors import Reason, RefusedError
from node.policy import ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.store.high_water import HighWater


def admit_offer(offer: Manifest, *, retained: Iterable[Manifest], mark: HighWater) -> frozenset[ArtifactKey]:
    """Return the retained artifacts that ``offer`` makes worthless; usually none.

    What is known of the offer's version number decides: from manifests of that version, from manifests
    that start from it, and from the announced head.

        the same root       accepted, whatever its epoch: these are the same words again
        another root        a fork; accepted only if that version was never announced and every
                            manifest that names it is of an older epoch
        nothing             accepted if it is neither of an older epoch nor behind the head

    Args:
        offer: with a verified signature.
        retained: every artifact of the store, complete or not.
        mark: the newest admitted epoch and the announced head.
    Raises:
        RefusedError: FENCED or ROLLBACK.
    """
    epochs_of_others: dict[ArtifactKey, int] = {}
    is_known = mark.head == offer.policy_version
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
            mark.admit(learner_epoch=offer.learner_epoch, version=offer.policy_version)
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
            fix="restore the learner from its newest checkpoint",
        )
    return frozenset(epochs_of_others)
