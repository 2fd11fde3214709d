"""The version already published when a learner starts, and its words: the next is coded against them."""

import logging
from typing import Final

from learner.masters.version_coder import VersionCoder
from node.errors import RefusedError, StartupError
from node.values.policy import PolicyVersion
from node.weights.assembly.stored import StoredVersions
from node.weights.format.digests import version_root
from node.weights.planning.cheapest_chain import PUBLIC_VERSION

logger = logging.getLogger(__name__)

_FIX: Final = "Restore this run's own state directory, or begin a new run: a number must not be used twice."


def newest_published(
    own: PolicyVersion | None, run: PolicyVersion | None, *, learner_version: int
) -> PolicyVersion | None:
    """Return the newest version that anybody may have; None: none was published.

    Args:
        own: head of the learner's store.
        run: head of the coordinator's.
    Raises:
        StartupError: the run is ahead of this learner, or on another branch.
    """
    if own is not None and run is not None and own.number == run.number and own.root != run.root:
        raise StartupError(
            f"Version {run.number} of the run has root {run.root.hex()}, this learner's {own.root.hex()}",
            fix=_FIX,
        )
    newest = max(
        (head for head in (own, run) if head is not None), key=lambda head: head.number, default=None
    )
    if newest is not None and newest.number > learner_version:
        raise StartupError(
            f"The run is at version {newest.number}, this learner's newest step is {learner_version}",
            fix=_FIX,
        )
    return newest


def take_up(
    coder: VersionCoder, stored: StoredVersions, published: PolicyVersion | None
) -> PolicyVersion | None:
    """Make the newest published version again with ``coder``, from the learner's store.

    Args:
        published: None: nothing but the public base model.
    Returns:
        That version; None: the store does not lead there, and ``coder`` has none.
    """
    number = PUBLIC_VERSION if published is None else published.number
    try:
        with stored.opened(number) as version:
            digests = coder.rebuild(version)
    except RefusedError as refused:
        logger.warning("published words not rebuilt", extra={"version": number, "detail": str(refused)})
        return None
    made = PolicyVersion(number, version_root(coder.layout.digest, digests))
    if published is not None and made != published:
        logger.warning("the store leads to other words", extra={"version": number})
        return None
    coder.keep()
    return made
