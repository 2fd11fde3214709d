"""Keyframes and deltas over many versions: artifacts that are published besides each version's own delta.

    keyframe          once ``keyframe_every_versions`` versions have passed since the newest one
    catch-up delta    over many versions, while no newer version waits; see ``planning.skip_deltas``

The newest version always comes first, and a version that training has left behind is never published:
``learner.masters.master_access`` sees to that.
"""

import logging
from collections.abc import Callable

from learner.masters.version_coder import VersionCoder
from learner.publishing.signer import Signer
from node.errors import RefusedError
from node.values.policy import ArtifactKey, PolicyVersion
from node.weights.assembly.merge import join_merged
from node.weights.assembly.stored import StoredVersions
from node.weights.format.manifest import signed_by
from node.weights.planning.skip_deltas import next_base

logger = logging.getLogger(__name__)


class FurtherArtifacts:
    """Decides what the learner's store lacks, and makes deltas for peers that fell behind."""

    def __init__(
        self,
        stored: StoredVersions,
        signer: Signer,
        *,
        keyframe_every_versions: int,
        public_delta_every_versions: int,
        longest_lag_versions: Callable[[], int],
    ) -> None:
        """Complete the store of ``stored``.

        Args:
            longest_lag_versions: of any peer, as far as is known.
        """
        self.stored, self._store = stored, stored.store
        self.signer = signer
        self._keyframe_every_versions = keyframe_every_versions
        self._public_delta_every_versions = public_delta_every_versions
        self._longest_lag_versions = longest_lag_versions
        self._given_up: ArtifactKey | None = None

    def is_keyframe_due(self, version: int) -> bool:
        """Return whether ``version``, just published, should be stored as a keyframe too."""
        announcement = self._store.announcement()
        artifacts = () if announcement is None else announcement.artifacts
        # The public base model is version 0.
        newest = max((a.key.version for a in artifacts if a.key.is_keyframe), default=0)
        return version - newest >= self._keyframe_every_versions

    def next_delta(self, head: int) -> ArtifactKey | None:
        """Return the catch-up delta to make next; None: there are enough, or ``head`` is not the newest."""
        announcement = self._store.announcement()
        if announcement is None or announcement.head.number != head:
            return None
        base = next_base(
            head,
            announcement.artifacts,
            longest_lag_versions=self._longest_lag_versions(),
            public_every_versions=self._public_delta_every_versions,
        )
        key = None if base is None else ArtifactKey(head, base)
        return None if key == self._given_up else key

    def make_delta(
        self,
        coder: VersionCoder,
        head: PolicyVersion,
        key: ArtifactKey,
        *,
        is_superseded: Callable[[], bool],
    ) -> None:
        """Code, sign and store one delta, unless ``is_superseded`` meanwhile. In the publishing thread.

        A delta that cannot be made is not tried again: the steps lead to the same words.

        Args:
            head: the version that ``coder`` has as published.
        """
        announcement = self._store.announcement()
        manifest = None
        try:
            with self._store.draft() as draft, self.stored.opened(key.base_version) as old:
                merged = coder.merge(old, draft.append, is_superseded=is_superseded)
                if merged is not None:
                    manifest = join_merged(
                        merged,
                        head=head,
                        base_version=key.base_version,
                        layout=coder.layout,
                        run_id=self.signer.run_id,
                        learner_epoch=self.signer.learner_epoch,
                        published_at_s=0.0 if announcement is None else announcement.published_at_s,
                    )
                    self._store.put_version(signed_by(manifest, self.signer.key), draft)
        except RefusedError as refused:
            logger.warning("merged delta not made", extra={"artifact": str(key), "detail": str(refused)})
            self._given_up = key
            return
        if manifest is not None:
            fields = {"version": key.version, "base_version": key.base_version}
            logger.info("merged", extra={**fields, "size_bytes": manifest.size_bytes})
