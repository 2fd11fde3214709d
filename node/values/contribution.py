"""Messages between a learner that merges and its contributors; fields as in merge.proto."""

from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import blake3

from node.values.groups.rollout import EncodedGroup

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ContributorHello:
    """Opens a contributor's stream."""

    layout_digest: bytes
    base_root: bytes
    held_group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contribution:
    """A change of the masters by steps on some groups."""

    number: int
    """Greater than those before, also of the process before this one."""
    base_version: int
    """The version that the steps began from."""
    report: bytes
    """Steps and groups, JSON."""
    payload: bytes
    """The change as coded. Empty: there is none."""
    digest: bytes
    """16 bytes, BLAKE3 of report and payload: two contributions with one digest are the same."""

    @classmethod
    def of(cls, number: int, base_version: int, report: bytes, payload: bytes) -> Self:
        """Return a contribution with its digest."""
        digest = blake3.blake3(report).update(payload).digest(length=DIGEST_BYTES)
        return cls(number, base_version, report, payload, digest)


@dataclass(frozen=True, slots=True)
class MergeTerms:
    """By what contributors train; both settings are JSON that learner and contributor alone read."""

    step_settings: bytes
    merge_settings: bytes
    batch_groups: int
    """Groups of a step."""


@dataclass(frozen=True, slots=True)
class ContributionAnswer:
    """The learner's answer to a contribution."""

    number: int
    merged_version: int | None = None
    """The version that it is part of, durable. None: refused."""
    detail: str = ""
    """Why it was refused, for people."""


@dataclass(frozen=True, slots=True)
class GroupsTaken:
    """Groups that the contributor no longer trains on."""

    group_ids: tuple[str, ...]


ToContributor: TypeAlias = MergeTerms | EncodedGroup | ContributionAnswer | GroupsTaken
