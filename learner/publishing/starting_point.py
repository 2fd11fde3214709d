"""The version already published when a learner starts, and its words: the next is coded against them."""

import logging
from concurrent.futures import Executor
from typing import Final

import numpy as np

from node.errors import RefusedError, StartupError
from node.policy import PolicyVersion
from node.weights.assembly.held import HeldPolicy
from node.weights.assembly.merge import stored_version
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.planning.cheapest_chain import PUBLIC_VERSION
from node.weights.store.artifact_store import ArtifactStore

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


def published_words(
    store: ArtifactStore,
    published: PolicyVersion | None,
    *,
    layout: Layout,
    words0: Words,
    executor: Executor,
) -> HeldPolicy | None:
    """Return the newest published version, from the learner's store; None: it does not lead there.

    Args:
        published: None: nothing but the public base model, ``words0``.
        executor: rebuilds frames side by side.
    """
    number = PUBLIC_VERSION if published is None else published.number
    words = np.empty(layout.words, np.uint16)
    try:
        with stored_version(store, number, layout=layout, words0=words0) as frame_words:

            def rebuild(frame: int) -> None:
                words[layout.frames[frame].slice] = frame_words(frame)

            list(executor.map(rebuild, range(len(layout.frames))))
    except RefusedError as refused:
        logger.warning("published words not rebuilt", extra={"version": number, "detail": str(refused)})
        return None
    held = HeldPolicy.of(number, words, layout=layout)
    if published is not None and held.version != published:
        logger.warning("the store leads to other words", extra={"version": number})
        return None
    return held
