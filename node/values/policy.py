"""Policy versions and the ways to fetch them, as values.

Numbers only grow within a run. Version 0 is the public base model, which every peer has on disk; the
learner's n-th optimizer step makes version n. A learner faster than its uplink does not publish them all.
"""

from dataclasses import dataclass
from typing import Final

ROOT_BYTES: Final = 16
BASE_PARTS: Final = 64
BASE_PART_BYTES: Final = 8
NO_BASE: Final = -1
"""``base_version`` of an artifact that starts from nothing (a keyframe)."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A version number and the digest of all words of that version."""

    number: int
    root: bytes = b""
    """ROOT_BYTES bytes; empty where only the number is known."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Version 0 as peers tell of it when they join: its root, and what shows in what another one differs."""

    root: bytes = b""
    """ROOT_BYTES bytes; empty: not known yet."""
    parts: bytes = b""
    """A digest of BASE_PART_BYTES bytes for each of up to BASE_PARTS runs of frames."""
    part_names: tuple[str, ...] = ()
    """The tensor with which each part begins, for people."""


@dataclass(frozen=True, slots=True, order=True)
class ArtifactKey:
    """Names the artifact that makes ``version`` from ``base_version``."""

    version: int
    base_version: int = NO_BASE

    @property
    def is_keyframe(self) -> bool:
        return self.base_version == NO_BASE


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact that can be fetched, with its size."""

    key: ArtifactKey
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """The newest version a source can serve whole, and all artifacts it has."""

    head: PolicyVersion
    learner_epoch: int
    published_at_s: float
    artifacts: tuple[Artifact, ...]
    in_bucket: tuple[ArtifactKey, ...] = ()
    """The part of them whose payloads are in the source's bucket too."""
