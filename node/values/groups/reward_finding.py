"""A verifier's finding about the rewards of a group."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from node.values.groups.failure import Failure


class RewardCheck(enum.StrEnum):
    """The outcome of a verifier's check. Closed: also the ``outcome`` label of a counter."""

    AGREED = "agreed"
    DISAGREED = "disagreed"
    UNGRADABLE = "ungradable"
    """The grader raises or is killed, although the group says that it was graded."""
    SKIPPED = "skipped"
    """The grader could not be asked, through no fault of the group."""
    GRADED = "graded"
    """Its sampler had left the rewards to verifiers; the finding has them."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupGrades:
    """A grader's numbers for a group."""

    rewards: NDArray[np.float32]
    """[completions]"""
    metrics: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """As in ``RolloutGroup``."""


@dataclass(frozen=True, slots=True)
class RewardFinding:
    """A verifier's answer about one group."""

    group_id: str
    outcome: RewardCheck
    detail: str = ""
    """Which completions, with the values, for people; empty where it agrees."""
    fault: Failure | None = None
    """How the grader failed, where the group is ungradable; None: the group itself is not as it may be."""
    grades: GroupGrades | None = None
    """Set for a group that was graded."""
    graded_s: float | None = None
    """Seconds that the grader worked, without the wait for one; None: not told."""
