"""The leases this sampler works on, and how many more it can take.

    prompting --> ready --> generating --finished--> grading --graded--> outbox --handed in--> (gone)
        |           |           |                       |
        +-----------+-----------+------- dropped -------+

Finished work is never dropped because its lease was lost: the first attempt handed in wins.
"""

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.rollout import PromptLease
from sampler.rollouts.prompt_prefetch import Prefetch
from sampler.tasks.grader_pool import TaskPrompt


class Stage(enum.StrEnum):
    """How far a lease has come."""

    PROMPTING = "prompting"
    """The task is asked for the prompt."""
    READY = "ready"
    """The prompt is there and waits for a place in the engine."""
    GENERATING = "generating"
    GRADING = "grading"
    OUTBOX = "outbox"


UNBEGUN: Final = frozenset({Stage.PROMPTING, Stage.READY})
UNFINISHED: Final = UNBEGUN | {Stage.GENERATING}


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as it was made once for a lease: what is sampled from, recorded and graded."""

    made: TaskPrompt
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One lease and where it is."""

    lease: PromptLease
    at_s: float
    """Unix seconds, this sampler's clock: when it was taken; from GENERATING on, when that began."""
    stage: Stage = Stage.PROMPTING
    prompt: Prompt | None = None
    """From READY on."""


class Workload:
    """What is under way: at most ``concurrency_groups`` generating, ``outbox_groups`` more behind them.

    Before them wait as many more as ``Prefetch`` finds necessary.
    """

    def __init__(self, *, concurrency_groups: int, outbox_groups: int) -> None:
        self._concurrency_groups = concurrency_groups
        self._outbox_groups = outbox_groups
        self._jobs: dict[str, Job] = {}
        self._prefetch = Prefetch()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Every lease to be renewed."""
        return tuple(self._jobs)

    def count(self, *stages: Stage) -> int:
        """Jobs at any of ``stages``."""
        return sum(job.stage in stages for job in self._jobs.values())

    def room(self) -> int:
        """Return how many leases can be taken now; 0 when the outbox is backed up, however idle it is."""
        limit = self._concurrency_groups + self._prefetch.ahead(self._concurrency_groups)
        return max(0, min(limit - self.count(*UNFINISHED), limit + self._outbox_groups - len(self._jobs)))

    def take(self, lease: PromptLease, *, now: float) -> None:
        """Note a lease that is worked on from now."""
        self._jobs[lease.lease_id] = Job(lease, now)

    def make_ready(self, lease_id: str, prompt: Prompt, *, now: float) -> None:
        """Note a lease's prompt; passed over if it was dropped meanwhile."""
        if (job := self._jobs.get(lease_id)) is not None:
            self._prefetch.note_prompt(now - job.at_s)
            self._jobs[lease_id] = replace(job, stage=Stage.READY, prompt=prompt)

    def begin_next(self, *, now: float) -> Job | None:
        """Begin generating for the longest ready prompt; None where there is none, or no place."""
        if self.count(Stage.GENERATING) >= self._concurrency_groups:
            return None
        job = next((job for job in self._jobs.values() if job.stage is Stage.READY), None)
        if job is not None:
            job = self._jobs[job.lease.lease_id] = replace(job, stage=Stage.GENERATING, at_s=now)
        return job

    def finish(self, lease_id: str, *, now: float) -> Job | None:
        """Note that generating has ended and return the job; None if it was dropped meanwhile."""
        job = self.advance(lease_id, Stage.GRADING)
        if job is not None:
            self._prefetch.note_group(now - job.at_s)
        return job

    def advance(self, lease_id: str, stage: Stage) -> Job | None:
        """Move a job on and return it; None if it was dropped meanwhile."""
        if lease_id not in self._jobs:
            return None
        self._jobs[lease_id] = replace(self._jobs[lease_id], stage=stage)
        return self._jobs[lease_id]

    def settle(self, lease_id: str) -> Job | None:
        """Forget a job, handed in or given up, and return it; None if it was dropped meanwhile."""
        return self._jobs.pop(lease_id, None)

    def drop(self, stages: Collection[Stage], lease_ids: Iterable[str] | None = None) -> tuple[str, ...]:
        """Forget jobs at any of ``stages``, all or those named, and return their leases."""
        named = self._jobs.keys() if lease_ids is None else [i for i in lease_ids if i in self._jobs]
        dropped = tuple(i for i in named if self._jobs[i].stage in stages)
        for lease_id in dropped:
            del self._jobs[lease_id]
        return dropped
