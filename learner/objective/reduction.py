"""From one loss a completion or token to one loss a batch: what the sum is divided by.

Every divisor counts the original mask and all completions, whatever was clipped, masked or
discounted away: a batch with less to say makes a smaller step.
"""

import torch
from torch import Tensor

from learner.objective.batch import ObjectiveBatch


def mean_over_groups(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean over groups of the mean over their completions.

    Args:
        loss: [n]
        batch: whose groups and outer factor count.
    """
    groups = batch.groups
    share = batch.counted(1 / (groups.spread(groups.size(loss.detach().double())) * groups.count))
    return (share.to(loss.dtype) * loss).sum()


def mean_over_completions(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean of [n] over all completions."""
    return batch.counted(loss).sum() / len(loss)


def mean_of_token_means(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean over completions of the mean over their tokens, from [n, t].

    A token of a long completion counts less than one of a short completion.

    Source: GRPO, arXiv:2402.03300, eq. 3.
    """
    return mean_over_completions(batch.token_mean(loss), batch)


def mean_over_tokens(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the mean of [n, t] over all tokens of the batch.

    Source: DAPO, arXiv:2503.14476, section 3.3.
    """
    return batch.counted(batch.within(loss)).sum() / batch.mask.sum()


def mean_over_budget(loss: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Return the sum of [n, t] over n * max_tokens: no completion's length changes its weight.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.
    """
    return batch.counted(batch.within(loss)).sum() / (len(loss) * batch.max_tokens)


def mean_over_kept_tokens(loss: Tensor, batch: ObjectiveBatch, *, keep: Tensor) -> Tensor:
    """Return the mean of [n, t] over the tokens of the completions to keep, [n], bool; 0 if there are none.

    Source: DAPO's dynamic sampling, arXiv:2503.14476, section 3.2: what is not kept was never in the batch.
    """
    mask = batch.mask & keep[:, None]
    return batch.counted(torch.where(mask, loss, 0.0)).sum() / mask.sum().clamp(min=1)
