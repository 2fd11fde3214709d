"""Ends of training: nothing is left to do, or it cannot go on; pure."""

from learner.config import LearnerConfig
from learner.journal.progress import Progress
from node.errors import HeteroRLError


class TrainingError(HeteroRLError):
    """Training cannot go on. The last good version stays checkpointed and published."""


def completion_of(progress: Progress, config: LearnerConfig) -> str:
    """Return why there is nothing left to do, in a few words; empty while there is."""
    limit, goal = config.max_versions, config.stop_at_reward
    if 0 < limit <= progress.version:
        return f"done: version {progress.version} of {limit}"
    window = config.stop_window_versions
    reward = progress.window_mean(window=window)
    if goal is not None and reward is not None and reward >= goal:
        return f"done: mean reward {reward:.4g} over {window} batches, the goal is {goal:g}"
    return ""
