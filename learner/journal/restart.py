"""The plan of a restart, and when a checkpoint is due; pure.

    checkpoint c, segments, published p --plan--> load c; take the steps c+1..h again; compare at p

The words published under p are what they are: whatever the replay computes, the next version is coded against
them, and has a number above p. If p is older than c there is nothing to compare.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from learner.journal.progress import Progress, StepEntry
from learner.journal.records import NO_DIGEST, JournalRecord, Origin, Segment
from node.policy import PolicyVersion

KEPT_CHECKPOINTS: Final = 2
"""Where the newest is damaged it can be removed: the one before and the journal lead to the same version."""


class RestartError(ValueError):
    """Checkpoint, journal and publications do not fit together; says which segment, or 0, and how."""

    def __init__(self, segment: int, what: str) -> None:
        super().__init__(what)
        self.segment = segment


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """A place between two entries: which segment comes next, and the digest of the entry before."""

    next_segment: int = 1
    digest: str = NO_DIGEST.hex()
    """Hex."""


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
    segments: Sequence[Segment],
    *,
    origin: Origin | None,
    published: PolicyVersion | None,
) -> RestartPlan:
    """Return what to do to get from a checkpoint to where the learner stopped.

    Args:
        start: the checkpoint's; version 0 where there is none.
        place: where the journal was when the checkpoint's copy was made.
        segments: from ``place`` on, ascending.
        origin: the run and the model they must be of; None: any.
        published: the newest version in the learner's own store.
    Raises:
        RestartError: a segment is missing or of another run; a step is missing; the journal ends before
            ``published``.
    """
    version, records = start.version, list[JournalRecord]()
    for segment in segments:
        header = segment.header
        if origin is not None and (difference := origin.difference(header.origin)):
            raise RestartError(header.number, f"it is of another run or model: {difference}")
        if header.number != place.next_segment:
            raise RestartError(place.next_segment, "it is missing: it comes before segments that are there")
        if (header.version, header.previous_digest) != (version, place.digest):
            raise RestartError(
                header.number,
                f"it begins after version {header.version}, and does not follow on the entry before, which "
                f"is of version {version}",
            )
        for number, record in enumerate(segment.records, start=1):
            if isinstance(record.entry, StepEntry):
                if record.entry.version != version + 1:
                    raise RestartError(
                        header.number,
                        f"entry {number} is of step {record.entry.version}, and the one before of {version}",
                    )
                version += 1
            records.append(record)
        place = JournalPlace(header.number + 1, segment.digest.hex())
    if published is not None and published.number > version:
        raise RestartError(
            0, f"version {published.number} was published, and the newest step in the journal is {version}"
        )
    is_comparable = published is not None and start.version <= published.number
    return RestartPlan(tuple(records), version, published if is_comparable else None, place)


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


def surplus_segments(numbers: Sequence[int], *, places: Sequence[JournalPlace]) -> list[int]:
    """Return the segments that neither of two kept checkpoints needs.

    Until there are two, the base model is the older one.
    """
    needed = min(place.next_segment for place in places) if len(places) >= KEPT_CHECKPOINTS else 1
    return [number for number in numbers if number < needed]
