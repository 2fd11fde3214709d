"""The newest policy ever accepted: nothing older, and no other policy of that number, is accepted again.

A signature says who made a version, not when. Someone who keeps old manifests could serve them
again (replay, rollback), and a learner restored from an old checkpoint could make version n twice
(fork). Version numbers grow within a run, and the epoch grows with every start of the learner, so a
mark that survives restarts detects all three.

    older epoch                         FENCED     a second learner, or one that was rolled back
    older version, whatever the epoch   ROLLBACK
    same version, another root          ROLLBACK   a fork
    same version, same root             accepted: it is what we have
"""

from dataclasses import dataclass

from node.errors import Reason, RefusedError
from node.policy import PolicyVersion


@dataclass(frozen=True, slots=True)
class HighWater:
    """The newest epoch and version seen; ``HighWater()``: none. Persist it before acting on it."""

    learner_epoch: int = 0
    head: PolicyVersion | None = None

    def admit(self, *, learner_epoch: int, version: PolicyVersion) -> "HighWater":
        """Return the mark after accepting ``version``. Raises RefusedError: FENCED or ROLLBACK."""
        if learner_epoch < self.learner_epoch:
            raise RefusedError(
                Reason.FENCED,
                f"version {version.number} is of learner epoch {learner_epoch}, "
                f"but epoch {self.learner_epoch} was seen",
                fix="stop the older learner",
            )
        if self.head is not None and version.number < self.head.number:
            raise RefusedError(
                Reason.ROLLBACK,
                f"version {version.number} is older than version {self.head.number}, which was seen before",
            )
        if self.head is not None and version.number == self.head.number and version.root != self.head.root:
            raise RefusedError(
                Reason.ROLLBACK,
                f"version {version.number} has root {version.root.hex()}, "
                f"but was seen before with root {self.head.root.hex()}",
                fix="restore the learner from its newest checkpoint",
            )
        return HighWater(learner_epoch, version)
