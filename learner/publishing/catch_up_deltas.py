"""Deltas over many versions, made in the publishing thread's spare time for those who fell behind."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from node.errors import RefusedError
from node.identity.signatures import SigningKey
from node.policy import ArtifactKey
from node.weights.assembly.held import HeldPolicy
from node.weights.assembly.merge import merge_version, stored_version
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest, sign
from node.weights.planning.catch_up import next_base
from node.weights.store.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Signer:
    """What makes an artifact this learner's."""

    key: SigningKey
    run_id: str
    learner_epoch: int


class CatchUp:
    """Knows what is missing and makes it, one artifact at a time."""

    def __init__(
        self,
        store: ArtifactStore,
        *,
        layout: Layout,
        words0: Words,
        signer: Signer,
        public_every_versions: int,
        longest_lag_versions: Callable[[], int],
    ) -> None:
        """Make artifacts for ``store``.

        Args:
            words0: the public base model; may be a memory map.
            longest_lag_versions: of any peer, as far as is known.
        """
        self._store = store
        self._layout = layout
        self._words0 = words0
        self._signer = signer
        self._public_every_versions = public_every_versions
        self._longest_lag_versions = longest_lag_versions
        self._given_up: set[ArtifactKey] = set()

    def next_key(self, head: int) -> ArtifactKey | None:
        """Give what to make next; None: nothing."""
        announcement = self._store.announcement()
        if announcement is None or announcement.head.number != head:
            return None
        base = next_base(
            head,
            announcement.artifacts,
            longest_lag_versions=self._longest_lag_versions(),
            public_every_versions=self._public_every_versions,
        )
        key = None if base is None else ArtifactKey(head, base)
        return None if key in self._given_up else key

    def make(self, head: HeldPolicy, key: ArtifactKey, *, is_superseded: Callable[[], bool]) -> None:
        """Code, sign and store one artifact; leave it when ``is_superseded``. In the publishing thread."""
        try:
            manifest = self._merge(head, key, is_superseded)
        except RefusedError as refused:
            # Nobody depends on it: the steps lead to the same words.
            self._given_up = {key}
            logger.warning("merged delta not made", extra={"artifact": str(key), "detail": str(refused)})
            return
        if manifest is not None:
            told = {"version": key.version, "base_version": key.base_version}
            logger.info("merged", extra={**told, "size_bytes": manifest.size_bytes})

    def _merge(
        self, head: HeldPolicy, key: ArtifactKey, is_superseded: Callable[[], bool]
    ) -> Manifest | None:
        with (
            self._store.draft() as draft,
            stored_version(
                self._store, key.base_version, layout=self._layout, words0=self._words0
            ) as base_frame,
        ):
            manifest = merge_version(
                head,
                base_version=key.base_version,
                base_frame=base_frame,
                layout=self._layout,
                run_id=self._signer.run_id,
                learner_epoch=self._signer.learner_epoch,
                published_at_s=self._published_at_s(),
                put=draft.append,
                is_superseded=is_superseded,
            )
            if manifest is not None:
                self._store.put_version(sign(manifest, self._signer.key), draft)
            return manifest

    def _published_at_s(self) -> float:
        announcement = self._store.announcement()
        return 0.0 if announcement is None else announcement.published_at_s
