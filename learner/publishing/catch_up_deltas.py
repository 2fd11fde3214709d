"""Deltas over many versions, for peers that fell behind; made in the publishing thread."""

import logging
from collections.abc import Callable

from learner.publishing.signer import Signer
from node.errors import RefusedError
from node.policy import ArtifactKey
from node.weights.assembly.held import HeldPolicy
from node.weights.assembly.merge import merge_version, stored_version
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.manifest import signed_by
from node.weights.store.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)


class CatchUpDeltas:
    """Makes deltas from the learner's own store and the public base model, one at a time."""

    def __init__(self, store: ArtifactStore, *, layout: Layout, words0: Words, signer: Signer) -> None:
        """Make artifacts for ``store``; ``words0``, the public base model, may be a memory map."""
        self._store = store
        self._layout = layout
        self._words0 = words0
        self._signer = signer

    def make(self, head: HeldPolicy, key: ArtifactKey, *, is_superseded: Callable[[], bool]) -> bool:
        """Code, sign and store one delta, unless ``is_superseded`` meanwhile; False if it cannot be made."""
        announcement = self._store.announcement()
        base = stored_version(self._store, key.base_version, layout=self._layout, words0=self._words0)
        try:
            with self._store.draft() as draft, base as base_frame:
                manifest = merge_version(
                    head,
                    base_version=key.base_version,
                    base_frame=base_frame,
                    layout=self._layout,
                    run_id=self._signer.run_id,
                    learner_epoch=self._signer.learner_epoch,
                    published_at_s=0.0 if announcement is None else announcement.published_at_s,
                    put=draft.append,
                    is_superseded=is_superseded,
                )
                if manifest is not None:
                    self._store.put_version(signed_by(manifest, self._signer.key), draft)
        except RefusedError as refused:
            logger.warning("merged delta not made", extra={"artifact": str(key), "detail": str(refused)})
            return False
        if manifest is not None:
            fields = {"version": key.version, "base_version": key.base_version}
            logger.info("merged", extra={**fields, "size_bytes": manifest.size_bytes})
        return True
