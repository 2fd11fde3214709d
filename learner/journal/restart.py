"""The plan of a restart: from which checkpoint, which steps again, and which entries it needs; pure.

    checkpoint c, entries, published p --plan--> load c; take the steps c+1..h again; compare at p

The words published under p are what they are: whatever the replay computes, the next version is coded against
them, and has a number above p. If p is older than c there is nothing to compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from learner.journal.entry_rows import NO_DIGEST, DamagedJournalError, EntryRow
from learner.journal.progress import Entry, Progress, StepEntry
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


def first_needed(places: Sequence[JournalPlace]) -> int:
    """Return the first entry that one of two kept checkpoints needs, given where the journal was at each.

    Until there are two, the base model is the older one.
    """
    return min(place.next_entry for place in places) if len(places) >= KEPT_CHECKPOINTS else 1
