"""The noise mask's objective as its authors released it, beside which ``rloo`` is the textbook's."""

import torch

from learner.objective.batch import ObjectiveBatch, ObjectiveOutcome
from learner.objective.options import Options


def as_released(batch: ObjectiveBatch, options: Options) -> ObjectiveOutcome:
    r"""Return the mean cost times the mean log of the *sum* of each mask's densities.

    With c_i = -reward_i and d_ij the density of cell j: L = mean(c) * mean_i log sum_j d_ij. One backward
    pass went through both networks, so that the classifier's mean cost has the second factor for a weight.
    There is no baseline, and nothing corrects for staleness.

    Source: the authors' code of arXiv:2406.14568, train_one_epoch.py.
    """
    cells = batch.learner_logprob.masked_fill(~batch.mask, -torch.inf)
    log_sum = torch.logsumexp(cells, dim=1)
    cost = -batch.reward.mean().to(log_sum.dtype)
    return ObjectiveOutcome(
        loss=cost * batch.counted(log_sum).mean(),
        weight=torch.ones_like(log_sum).detach(),
        is_clipped=torch.zeros_like(log_sum, dtype=torch.bool),
        beside_weight=log_sum.detach().mean(),
    )
