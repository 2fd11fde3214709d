"""A contribution on its way to the learner that merges it, and its terms, as their stream carries them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MergeTerms:
    """By what contributors train; both settings are JSON that learner and contributor alone read."""

    step_settings: bytes
    merge_settings: bytes
    batch_groups: int
    """Groups of a step."""


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
    payload_digest: bytes
    """16 bytes, BLAKE3."""


@dataclass(frozen=True, slots=True)
class ContributionAnswer:
    """The learner's answer to a contribution."""

    number: int
    merged_version: int | None = None
    """The version that it is part of, durable. None: refused."""
    detail: str = ""
    """Why it was refused, for people."""
