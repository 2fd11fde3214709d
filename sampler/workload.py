"""The leases this sampler works on, and how many more it can take.

    taken --> generating --finished--> grading --graded--> outbox --handed in--> (gone)
                  |                       |
                  +------- dropped -------+

Finished work is never dropped because its lease was lost: the first attempt handed in wins.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from node.rollout import PromptLease


class Stage(enum.StrEnum):
    """How far a lease has come."""

    GENERATING = "generating"
    GRADING = "grading"
    OUTBOX = "outbox"


@dataclass(frozen=True, slots=True)
class Job:
    """One lease and where it is."""

    lease: PromptLease
    started_at_s: float
    """Unix seconds, this sampler's clock."""
    stage: Stage = Stage.GENERATING


class Workload:
    """What is under way: at most ``concurrency_groups`` generating, ``outbox_groups`` more behind them."""

    def __init__(self, *, concurrency_groups: int, outbox_groups: int) -> None:
        self._concurrency_groups = concurrency_groups
        self._outbox_groups = outbox_groups
        self._jobs: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Every lease to be renewed."""
        return tuple(self._jobs)

    def count(self, stage: Stage) -> int:
        """Jobs at ``stage``."""
        return sum(job.stage is stage for job in self._jobs.values())

    def room(self) -> int:
        """Give how many leases can be taken now; 0 when the outbox is backed up, however idle the engine."""
        generating = self._concurrency_groups - self.count(Stage.GENERATING)
        altogether = self._concurrency_groups + self._outbox_groups - len(self._jobs)
        return max(0, min(generating, altogether))

    def take(self, lease: PromptLease, *, now: float) -> None:
        """Note a lease that is worked on from now."""
        self._jobs[lease.lease_id] = Job(lease, now)

    def advance(self, lease_id: str, stage: Stage) -> Job | None:
        """Move a job on and give it; None if it was dropped meanwhile."""
        if lease_id not in self._jobs:
            return None
        self._jobs[lease_id] = replace(self._jobs[lease_id], stage=stage)
        return self._jobs[lease_id]

    def settle(self, lease_id: str) -> None:
        """Forget a job: handed in, or given up."""
        self._jobs.pop(lease_id, None)

    def drop_generating(self, lease_ids: Iterable[str] | None = None) -> tuple[str, ...]:
        """Forget jobs still generating, all or those named, and give their leases."""
        named = self._jobs.keys() if lease_ids is None else [i for i in lease_ids if i in self._jobs]
        dropped = tuple(i for i in named if self._jobs[i].stage is Stage.GENERATING)
        for lease_id in dropped:
            del self._jobs[lease_id]
        return dropped
