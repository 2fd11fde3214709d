"""The plan of a restart, and when a checkpoint is due; pure.

    checkpoint c, entries, published p --plan--> load c; take the steps c+1..h again; compare at p

The words published under p are what they are: whatever the replay computes, the next version is coded against
them, and has a number above p. If p is older than c there is nothing to compare.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

from learner.config import LearnerConfig
from learner.journal.progress import Entry, Progress, StepEntry
from learner.journal.records import NO_DIGEST, DamagedJournalError, EntryRow
from node.values.policy import PolicyVersion

KEPT_CHECKPOINTS: Final = 2
"""Where the newest is damaged it can be removed: the one before and the journal lead to the same version."""


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """A place between two entries: which entry comes next, and the digest of the one before."""

    next_entry: int = 1
    digest: str = NO_DIGEST.hex()
    """Hex."""
    next_segment: int = 0
    """The next segment, in a checkpoint of release 0.3 or 0.2, whose journal had some. 0: a newer one's."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """An entry of the journal, and the row that has it."""

    entry: Entry
    row: EntryRow


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """The way from a checkpoint to where the learner stopped."""

    records: tuple[JournalRecord, ...]
    """To take in, in order."""
    version: int
    """The newest version in the journal."""
    compare: PolicyVersion | None
    """The published version whose words are compared with those of the replay; None: there is none."""
    end: JournalPlace


def plan_restart(
    start: Progress,
    place: JournalPlace,
    rows: Sequence[EntryRow],
    *,
    newest: int,
    published: PolicyVersion | None,
) -> RestartPlan:
    """Return what to do to get from a checkpoint to where the learner stopped.

    Args:
        start: the checkpoint's; version 0 where there is none.
        place: where the journal was when the checkpoint's copy was made.
        rows: from ``place`` on, ascending.
        newest: number of the newest entry that was written.
        published: the newest version in the learner's own store.
    Raises:
        DamagedJournalError: an entry is damaged or missing; a step is missing; the journal ends before
            ``published``.
    """
    version, records, digest = start.version, list[JournalRecord](), bytes.fromhex(place.digest)
    for number, row in enumerate(rows, start=place.next_entry):
        if row.number != number:
            raise DamagedJournalError(f"entry {number} is missing: it comes before entries that are there")
        entry = row.entry(previous=digest)
        if isinstance(entry, StepEntry):
            if entry.version != version + 1:
                raise DamagedJournalError(
                    f"entry {number} is of step {entry.version}, and the one before of version {version}"
                )
            version += 1
        records.append(JournalRecord(entry, row))
        digest = row.digest
    end = place.next_entry + len(rows)
    if newest >= end:
        raise DamagedJournalError(f"entry {end} is missing: {newest} were written")
    if published is not None and published.number > version:
        raise DamagedJournalError(
            f"version {published.number} was published, and the newest step in the journal is {version}"
        )
    is_comparable = published is not None and start.version <= published.number
    return RestartPlan(
        tuple(records), version, published if is_comparable else None, JournalPlace(end, digest.hex())
    )


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


def first_needed(places: Sequence[JournalPlace]) -> int:
    """Return the first entry that one of two kept checkpoints needs, given where the journal was at each.

    Until there are two, the base model is the older one.
    """
    return min(place.next_entry for place in places) if len(places) >= KEPT_CHECKPOINTS else 1
