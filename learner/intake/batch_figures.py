"""What a batch shows of the completions themselves, before any model looks at them; pure."""

from collections.abc import Sequence

import numpy as np

from learner.step_log import BatchFigures
from node.rollout import Finish, RolloutGroup


def batch_figures(groups: Sequence[RolloutGroup]) -> BatchFigures:
    """Measure the groups of a batch, at least one."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([completion.drawn_tokens for completion in completions])
    rewards = [np.array([completion.reward for completion in group.completions]) for group in groups]
    return BatchFigures(
        completion_tokens_mean=float(lengths.mean()),
        completion_tokens_p95=float(np.percentile(lengths, 95)),
        completion_tokens_max=int(lengths.max()),
        prompt_tokens_mean=float(np.mean([len(group.prompt_token_ids) for group in groups])),
        cut_ratio=float(np.mean([completion.finish is Finish.LENGTH for completion in completions])),
        reward_deviation=float(np.mean([of_group.std() for of_group in rewards])),
        zero_advantage_ratio=float(np.mean([np.ptp(of_group) == 0 for of_group in rewards])),
    )
