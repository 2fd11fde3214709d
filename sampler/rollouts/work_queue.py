"""The leases this sampler works on and how many more it can take; pure.

    prompting --> ready --> generating --finished--> grading --graded--> submitting --answered--> (gone)
        |           |           |                       |
        +-----------+-----------+------- dropped -------+

Losing a lease does not drop finished work: the first attempt that is handed in wins.
"""

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from node.values.groups.rollout import PromptLease
from sampler.rollouts.conversation import Conversation
from sampler.tasks.processes.grader_pool import Prompt


class JobState(enum.StrEnum):
    """How far a lease has come."""

    PROMPTING = "prompting"
    """The task is making the prompt."""
    READY = "ready"
    """The prompt waits for a place in the engine."""
    GENERATING = "generating"
    GRADING = "grading"
    SUBMITTING = "submitting"


UNBEGUN: Final = frozenset({JobState.PROMPTING, JobState.READY})
NOT_GENERATED: Final = UNBEGUN | {JobState.GENERATING}

SMOOTHING: Final = 0.2
"""Weight of the newest time in the running means, which then remember about five groups."""


@dataclass(slots=True, eq=False)
class Job:
    """One lease and what has become of it."""

    lease: PromptLease
    at_s: float
    """Unix seconds, this sampler's clock: when the lease was taken; from GENERATING on, when that began."""
    state: JobState = JobState.PROMPTING
    prompt: Prompt | None = None
    """From READY to GRADING."""
    conversations: tuple[Conversation, ...] = field(init=False)
    """One for each completion, to GRADING."""

    def __post_init__(self) -> None:
        self.conversations = tuple(Conversation() for _ in range(self.lease.group_size))


class WorkQueue:
    """Jobs in order of their leases.

    At most ``concurrency_groups`` generate and ``unsubmitted_groups`` more wait behind them. When a place in
    the engine becomes free, its next prompt should be ready. While a group takes g seconds,
    concurrency * p / g places become free in the p seconds that one prompt takes (Little's law): that
    many wait before them, and none where prompts are instant: nobody else can have a lease that waits here.

    Attributes:
        concurrency_groups: May change; groups that are generating go on.
        group_s: Running mean of the time to generate a group; None: none was generated yet.
    """

    def __init__(self, *, concurrency_groups: int, unsubmitted_groups: int) -> None:
        self.concurrency_groups = concurrency_groups
        self.group_s: float | None = None
        self._unsubmitted_groups = unsubmitted_groups
        self._jobs: dict[str, Job] = {}
        self._prompt_s: float | None = None
        """Running mean of the time to a prompt."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Every lease to renew."""
        return tuple(self._jobs)

    def count(self, *states: JobState) -> int:
        """Count the jobs in any of ``states``."""
        return sum(job.state in states for job in self._jobs.values())

    def room(self) -> int:
        """Return how many leases to take now; 0 while too many groups wait to be submitted."""
        in_all = self._limit() + self._unsubmitted_groups
        return max(0, min(self._limit() - self.count(*NOT_GENERATED), in_all - len(self._jobs)))

    def is_generating_by(self, version: int) -> bool:
        """Return whether there are leases not yet generated that only this version may answer."""
        return any(
            job.lease.policy_version == version and job.state in NOT_GENERATED for job in self._jobs.values()
        )

    def take(self, lease: PromptLease, *, now: float) -> None:
        """Add a lease."""
        self._jobs[lease.lease_id] = Job(lease, now)

    def make_ready(self, lease_id: str, prompt: Prompt, *, now: float) -> None:
        """Note a lease's prompt; ignored if the job was dropped meanwhile."""
        if (job := self._jobs.get(lease_id)) is not None:
            self._prompt_s = _mean(self._prompt_s, now - job.at_s)
            job.state, job.prompt = JobState.READY, prompt

    def begin_next(self, *, now: float) -> Job | None:
        """Move a ready job to GENERATING; None if no job is ready or the engine is full.

        The oldest of those that keep the sampler at a version, else the oldest.
        """
        if self.count(JobState.GENERATING) >= self.concurrency_groups:
            return None
        ready = (job for job in self._jobs.values() if job.state is JobState.READY)
        job = min(ready, key=lambda job: job.lease.policy_version is None, default=None)
        if job is not None:
            job.state, job.at_s = JobState.GENERATING, now
        return job

    def finish(self, lease_id: str, *, now: float) -> Job | None:
        """Note that a group is generated and return its job; None if it was dropped meanwhile."""
        job = self.advance(lease_id, JobState.GRADING)
        if job is not None:
            self.group_s = _mean(self.group_s, now - job.at_s)
        return job

    def advance(self, lease_id: str, state: JobState) -> Job | None:
        """Set a job's state and return the job; None if it was dropped meanwhile."""
        if (job := self._jobs.get(lease_id)) is not None:
            job.state = state
        return job

    def settle(self, lease_id: str) -> Job | None:
        """Remove a job that was submitted or given up and return it; None if it was dropped meanwhile."""
        return self._jobs.pop(lease_id, None)

    def backlog(self) -> JobState | None:
        """Return the state, GRADING or SUBMITTING, of most groups that leave no room for leases.

        None: there is room, or groups to generate fill it.
        """
        if self.room() or self.count(JobState.GRADING, JobState.SUBMITTING) <= self._unsubmitted_groups:
            return None
        return max((JobState.GRADING, JobState.SUBMITTING), key=self.count)

    def drop(self, states: Collection[JobState], lease_ids: Iterable[str] | None = None) -> tuple[str, ...]:
        """Remove the jobs in any of ``states``, of all leases or of those named; return their leases."""
        named = self._jobs.keys() if lease_ids is None else [i for i in lease_ids if i in self._jobs]
        dropped = tuple(i for i in named if self._jobs[i].state in states)
        for lease_id in dropped:
            del self._jobs[lease_id]
        return dropped

    def _limit(self) -> int:
        """Return how many leases may be here whose groups are not generated."""
        return self.concurrency_groups + self._ahead()

    def _ahead(self) -> int:
        concurrency = self.concurrency_groups
        if self._prompt_s is None or self.group_s is None:
            return 0
        if self.group_s <= 0:
            return concurrency if self._prompt_s > 0 else 0
        return min(concurrency, int(concurrency * self._prompt_s / self.group_s + 0.5))


def _mean(mean: float | None, newest: float) -> float:
    newest = max(0.0, newest)
    return newest if mean is None else mean + SMOOTHING * (newest - mean)
