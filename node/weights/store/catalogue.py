"""The announcement of a store: which of its artifacts it shows, and which it removes.

    complete, arriving  --except what is withheld and what only pins keep--> announced
    complete            --beyond retention, neither pinned nor read-------> removed

The head is the newest version that a peer with nothing but the public base model can get to; once announced
it never goes back, across restarts too (``head.json``). The store's lock serialises the calls; only the
announcement, the listeners and the readers are for any thread.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from node.system.listeners import Listeners
from node.values.policy import Announcement, Artifact, ArtifactKey
from node.weights.planning.cheapest_chain import newest_reachable
from node.weights.store.artifact_directories import ArtifactDirectories
from node.weights.store.high_water import HighWater
from node.weights.store.offers import surplus
from node.weights.store.pins import Pins
from node.weights.store.readers import Readers

logger = logging.getLogger(__name__)

HEAD_FILE: Final = "head.json"
PINS_FILE: Final = "pins.json"


class Catalogue:
    """The announcement of a store.

    Attributes:
        mark: The newest epoch and version ever announced.
        announcement: The head and every artifact that can be fetched; None before the first version.
        changes: Listeners to changes of the announcement or of what is whole.
        arriving: Artifacts that are announced while their frames arrive.
        withheld: Complete artifacts that are not announced yet.
        awaited: A version that slow peers are still to come to; a way to it stays. None: the head alone.
    """

    def __init__(
        self,
        root: Path,
        directories: ArtifactDirectories,
        *,
        retained_keyframes: int,
        monotonic: Callable[[], float],
    ) -> None:
        """Announce what ``directories`` holds, in view of what an earlier process left in ``root``.

        Raises OSError: a file cannot be read or written.
        """
        self._head_file = root / HEAD_FILE
        self._directories = directories
        self._retained_keyframes = retained_keyframes
        self.pins = Pins(root / PINS_FILE)
        self.readers = Readers(monotonic=monotonic)
        self.changes = Listeners()
        self.arriving: set[ArtifactKey] = set()
        self.withheld: set[ArtifactKey] = set()
        self.awaited: int | None = None
        self.announcement: Announcement | None = None
        self.mark = self._loaded_mark()
        self.update()

    def raise_epoch(self, learner_epoch: int) -> None:
        """Note an epoch, on disk too, if it is newer than all before. Raises OSError."""
        if learner_epoch > self.mark.learner_epoch:
            self._save(self.mark.model_copy(update={"learner_epoch": learner_epoch}))

    def update(self) -> bool:
        """Remove what is surplus, advance the head, and tell the listeners if anything changed.

        Returns whether it did.
        Raises OSError: the head cannot be written, or a directory cannot be moved.
        """
        complete = self._directories.complete_artifacts()
        self.withheld &= complete.keys()
        visible = self._visible(complete)
        self._advance_head(newest_reachable(visible.values()))
        if (head := self.mark.head) is None:
            return False
        for key in self._remove_surplus(complete, head=head.number):
            visible.pop(key, None)
        announcement = Announcement(
            head=head.policy_version,
            learner_epoch=head.learner_epoch,
            published_at_s=head.published_at_s,
            artifacts=tuple(visible[key] for key in sorted(visible)),
        )
        if announcement == self.announcement:
            return False
        self.announcement = announcement
        self.changes.notify()
        return True

    def _visible(self, complete: dict[ArtifactKey, Artifact]) -> dict[ArtifactKey, Artifact]:
        shown = (complete.keys() | self.arriving) - self.withheld
        manifests = (artifact.manifest for artifact in self._directories)
        return {manifest.key: manifest.artifact for manifest in manifests if manifest.key in shown}

    def _advance_head(self, newest: int | None) -> None:
        head = self.mark.head
        if newest is not None and (head is None or newest > head.number):
            makers = (a.manifest for a in self._directories if a.manifest.version == newest)
            self._save(self.mark.after(max(makers, key=lambda manifest: manifest.learner_epoch)))

    def _remove_surplus(self, complete: dict[ArtifactKey, Artifact], *, head: int) -> set[ArtifactKey]:
        """Remove what retention lets go and nobody needs; return what is not to be announced any more."""
        goes = surplus(
            # One that is withheld leads nobody anywhere yet: what it replaces stays until then.
            (artifact for key, artifact in complete.items() if key not in self.withheld),
            wanted=(head, self.awaited),
            retained_keyframes=self._retained_keyframes,
        )
        hidden = set(self.pins.kept(goes, complete.values()))
        for key in self.readers.removable(goes - hidden):
            artifact = self.readers.remove_unless_read(key, partial(self._directories.pop, key))
            if artifact is not None:
                hidden.add(key)
                self._directories.discard(artifact)
        return hidden

    def _save(self, mark: HighWater) -> None:
        mark.save(self._head_file)
        self.mark = mark

    def _loaded_mark(self) -> HighWater:
        try:
            return HighWater.load(self._head_file)
        except ValueError as error:
            logger.warning(
                "the mark of the store is damaged; taken from what is retained",
                extra={"error": str(error)},
            )
            epochs = (artifact.manifest.learner_epoch for artifact in self._directories)
            return HighWater(learner_epoch=max(epochs, default=0))
