"""Groups -> rows -> padded micro-batches.

A row is one completion with everything its loss needs. GEPO's denominator is data, so it is
computed here, once per whole group; after that rows are independent, and neither the order
nor the size of micro-batches can change a result.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.objective.advantage import centred_advantage
from learner.objective.importance import log_group_expectation
from learner.objective.staleness import version_discount
from node.rollout import RolloutGroup


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One completion on its way through the model."""

    prompt_token_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    """[n], n >= 1."""
    behaviour_logprob: NDArray[np.float32]
    """[n], nats."""
    temperature: float
    advantage: float
    log_expectation: float
    """log E_q[q] of its group, nats per token."""
    share: float
    """What its loss counts in the loss of the step."""

    @property
    def length(self) -> int:
        """Positions the model sees: the last token is only ever a target."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows, padded on the right. ``kept`` is the part of ``length`` that predicts completions."""

    input_ids: Tensor
    """[rows, length]"""
    target_ids: Tensor
    """[rows, kept]"""
    is_completion: Tensor
    """[rows, kept], bool: the original mask, by which every mean is taken."""
    behaviour_logprob: Tensor
    """[rows, kept], nats; 0 outside the mask."""
    temperature: Tensor
    """[rows]"""
    advantage: Tensor
    """[rows]"""
    log_expectation: Tensor
    """[rows]"""
    share: Tensor
    """[rows]"""


def rows_of(groups: Sequence[RolloutGroup], *, version: int, half_life_versions: float) -> list[Row]:
    """Give the rows of a step's groups.

    The loss of the step is (1/groups) sum_g discount_g (1/completions) sum_i loss_i. It is divided by
    the number of groups, not by the sum of discounts: a batch of old groups makes a small step.

    Args:
        groups: whole groups.
        version: learner version before the step.
        half_life_versions: see ``version_discount``.
    """
    rows = []
    for group in groups:
        means = [float(c.behaviour_logprob.mean(dtype=np.float64)) for c in group.completions]
        log_expectation = float(log_group_expectation(torch.tensor(means, dtype=torch.float64)))
        rewards = torch.tensor([c.reward for c in group.completions], dtype=torch.float64)
        discount = version_discount(version - group.oldest_version, half_life_versions=half_life_versions)
        for completion, advantage in zip(group.completions, centred_advantage(rewards).tolist(), strict=True):
            rows.append(
                Row(
                    prompt_token_ids=group.prompt_token_ids,
                    token_ids=completion.token_ids,
                    behaviour_logprob=completion.behaviour_logprob,
                    temperature=group.sampling.temperature,
                    advantage=advantage,
                    log_expectation=log_expectation,
                    share=discount / (len(groups) * len(group.completions)),
                )
            )
    return rows


def micro_batches(rows: Iterable[Row], *, budget_tokens: int) -> list[list[Row]]:
    """Cut rows into runs of similar length whose padded size is within the budget.

    Longest first, so that a run's first row sets its width; a row longer than the budget is alone.
    """
    cut: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if cut and cut[-1][0].length * (len(cut[-1]) + 1) <= budget_tokens:
            cut[-1].append(row)
        else:
            cut.append([row])
    return cut


def collate(rows: Sequence[Row], *, dtype: torch.dtype, device: torch.device) -> MicroBatch:
    """Pad ``rows`` to one width; numbers in ``dtype``."""
    length = max(row.length for row in rows)
    first = min(len(row.prompt_token_ids) for row in rows) - 1
    input_ids = np.zeros((len(rows), length), np.int64)
    target_ids = np.zeros((len(rows), length), np.int64)
    is_completion = np.zeros((len(rows), length), bool)
    behaviour_logprob = np.zeros((len(rows), length), np.float32)
    for i, row in enumerate(rows):
        tokens = np.concatenate([row.prompt_token_ids, row.token_ids])
        predicted = slice(len(row.prompt_token_ids) - 1, row.length)
        input_ids[i, : row.length] = tokens[:-1]
        target_ids[i, predicted] = row.token_ids
        is_completion[i, predicted] = True
        behaviour_logprob[i, predicted] = row.behaviour_logprob

    def scalars(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        target_ids=torch.from_numpy(target_ids[:, first:]).to(device),
        is_completion=torch.from_numpy(is_completion[:, first:]).to(device),
        behaviour_logprob=torch.from_numpy(behaviour_logprob[:, first:]).to(device, dtype),
        temperature=scalars([row.temperature for row in rows]),
        advantage=scalars([row.advantage for row in rows]),
        log_expectation=scalars([row.log_expectation for row in rows]),
        share=scalars([row.share for row in rows]),
    )
