"""The group that a job's completions and their grades make; pure."""

from collections.abc import Sequence

import numpy as np

from node.rollout import RolloutGroup
from sampler.rollouts.conversation import Conversation
from sampler.rollouts.work_queue import Job
from sampler.tasks.grader_process import Grades


def graded_group(
    job: Job,
    conversations: Sequence[Conversation],
    grades: Grades,
    *,
    run_id: str,
    grader_digest: bytes,
    layout_digest: bytes,
    tokenizer_digest: bytes,
    finished_at_s: float,
    graded_at_s: float,
    offset_s: float,
) -> RolloutGroup:
    """Return the group that answers a job's lease.

    Args:
        job: Generated and graded.
        finished_at_s: When the last completion was finished; Unix seconds on this sampler's clock.
        graded_at_s: When the last grade came; on the same clock.
        offset_s: Added to every time: how far the hub's clock is ahead of this sampler's.
    """
    assert job.prompt is not None, "a generated job has a prompt"
    lease = job.lease
    return RolloutGroup(
        run_id=run_id,
        group_id=lease.lease_id,
        layout_digest=layout_digest,
        tokenizer_digest=tokenizer_digest,
        task=lease.task,
        prompt_index=lease.prompt_index,
        prompt_token_ids=job.prompt.token_ids,
        completions=tuple(
            conversation.completion(reward=reward)
            for conversation, reward in zip(conversations, grades.rewards, strict=True)
        ),
        sampling=lease.sampling,
        # In order, although the clock may have been set meanwhile.
        sampling_started_at_s=min(job.at_s, finished_at_s, graded_at_s) + offset_s,
        sampling_finished_at_s=min(finished_at_s, graded_at_s) + offset_s,
        graded_at_s=graded_at_s + offset_s,
        task_digest=lease.task_digest,
        grader_digest=grader_digest,
        metrics={name: np.array(values, np.float32) for name, values in grades.metrics.items()},
    )
