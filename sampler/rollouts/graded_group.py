"""What a grader sees of the sampled completions, and the group that they and their grades make; pure."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from node.rollout import Completion, LogprobMode, RolloutGroup
from sampler.engines.engine import FinishedRequest
from sampler.engines.stop_strings import text_before_stop
from sampler.rollouts.work_queue import Job
from sampler.tasks.grader_process import Grades
from sampler.tasks.task import CompletionText


def completion_texts(
    finished: FinishedRequest, decode: Callable[[NDArray[np.int32]], str], *, stop: tuple[str, ...]
) -> list[CompletionText]:
    """Return the completions as a grader sees them: each ends before the stop string that ended it."""
    return [
        CompletionText(text_before_stop(decode(c.token_ids), stop), len(c.token_ids), c.finish.value)
        for c in finished.completions
    ]


def graded_group(
    job: Job,
    finished: FinishedRequest,
    grades: Grades,
    *,
    run_id: str,
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
            Completion(
                token_ids=sampled.token_ids,
                behaviour_logprob=sampled.behaviour_logprob,
                policy_version=sampled.policy_version,
                reward=reward,
                finish=sampled.finish,
                kept_mass=sampled.kept_mass,
            )
            for sampled, reward in zip(finished.completions, grades.rewards, strict=True)
        ),
        sampling=lease.sampling,
        logprob_mode=LogprobMode.SAMPLED,
        sampling_started_at_s=job.at_s + offset_s,
        sampling_finished_at_s=finished_at_s + offset_s,
        graded_at_s=graded_at_s + offset_s,
        metrics={name: np.array(values, np.float32) for name, values in grades.metrics.items()},
    )
