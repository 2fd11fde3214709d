"""When a checkpoint is due, by versions, time and the size of the journal; pure."""

import enum
from dataclasses import dataclass, fields
from typing import Self

from learner.config import LearnerConfig


class Due(enum.Enum):
    """Whether a checkpoint is to be made."""

    NOT = "not"
    SOON = "soon"
    """As soon as the one before it is written."""
    NOW = "now"
    """Training waits until the one before it is written."""


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """When a checkpoint is due; fields as in LearnerConfig."""

    checkpoint_every_versions: int
    checkpoint_every_s: float
    keep_every_versions: int
    journal_bytes: int

    @classmethod
    def of(cls, config: LearnerConfig) -> Self:
        """Return the configuration's."""
        return cls(*(getattr(config, one.name) for one in fields(cls)))

    def due(self, *, version: int, copied_version: int, age_s: float, new_bytes: int, all_bytes: int) -> Due:
        """Return whether a checkpoint is due.

        Args:
            version: the learner's.
            copied_version: of the newest checkpoint that was begun.
            age_s: time since then.
            new_bytes: of the journal, since then.
            all_bytes: of the journal.
        """
        is_new = version > copied_version
        if new_bytes and all_bytes >= self.journal_bytes:
            return Due.NOW
        if is_new and self.keep_every_versions and version % self.keep_every_versions == 0:
            return Due.NOW
        # The journal since the older of two checkpoints is kept, and another one is on its way.
        is_long = 4 * new_bytes >= self.journal_bytes
        is_old = is_new and age_s >= self.checkpoint_every_s
        if is_long or is_old or version - copied_version >= self.checkpoint_every_versions:
            return Due.SOON
        return Due.NOT
