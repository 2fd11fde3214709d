"""What is published besides each version's own delta, and when.

    keyframe          once ``keyframe_every_versions`` versions have passed since the newest one
    catch-up delta    over many versions, while no newer version waits; see ``planning.skip_deltas``

The newest version always comes first, and a version that training has left behind is never published:
``learner.training.master_access`` sees to that.
"""

from collections.abc import Callable

from node.policy import ArtifactKey
from node.weights.planning.skip_deltas import next_base
from node.weights.store.artifact_store import ArtifactStore


class PublishingSchedule:
    """Compares what the learner's store holds with what peers need."""

    def __init__(
        self,
        store: ArtifactStore,
        *,
        keyframe_every_versions: int,
        public_delta_every_versions: int,
        longest_lag_versions: Callable[[], int],
    ) -> None:
        """Decide what ``store`` lacks; ``longest_lag_versions`` is of any peer, as far as is known."""
        self._store = store
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

    def next_catch_up(self, head: int) -> ArtifactKey | None:
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

    def give_up(self, key: ArtifactKey) -> None:
        """Leave out a delta that could not be made: the steps lead to the same words."""
        self._given_up = key
