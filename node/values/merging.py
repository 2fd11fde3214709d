"""Messages between a learner that merges and its contributors, apart from those in ``contribution``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContributorHello:
    """Opens a contributor's stream; fields as in merge.proto."""

    layout_digest: bytes
    base_root: bytes
    held_group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContributionHead:
    """Begins a contribution, whose payload follows; fields as in merge.proto."""

    number: int
    base_version: int
    report: bytes
    payload_bytes: int
    payload_digest: bytes


@dataclass(frozen=True, slots=True)
class GroupsTaken:
    """Groups that the contributor no longer trains on."""

    group_ids: tuple[str, ...]
