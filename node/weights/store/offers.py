"""Which offered artifacts a store believes, given those it has and the newest it ever announced."""

from collections.abc import Iterable

from node.errors import Reason, RefusedError
from node.policy import ArtifactKey
from node.weights.format.manifest import Manifest
from node.weights.store.high_water import HighWater


def admit_offer(offer: Manifest, *, retained: Iterable[Manifest], mark: HighWater) -> frozenset[ArtifactKey]:
    """Give the retained artifacts that ``offer`` makes worthless; usually none.

    What is known of the offer's version number decides: from manifests of it, from manifests that
    start from it, from the head announced.

        the same root       believed, whatever its epoch: these are the words, sent again
        another root        a fork; believed only if nobody was ever told of that version and
                            every manifest that speaks of it is of an older epoch
        nothing             believed if it is neither of an older epoch nor behind the head

    Args:
        offer: its signature was verified.
        retained: every artifact of the store, complete or not.
        mark: the newest epoch admitted and the head announced.
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
            f"version {offer.version} of learner epoch {offer.learner_epoch} "
            f"differs from that of epoch {newest_other}",
            fix="stop the older learner",
        )
    is_public = mark.head is not None and offer.version <= mark.head.number
    if is_public or offer.learner_epoch == newest_other:
        raise RefusedError(
            Reason.ROLLBACK,
            f"version {offer.version} exists with another root than {offer.root.hex()}",
            fix="restore the learner from its newest checkpoint",
        )
    return frozenset(epochs_of_others)
