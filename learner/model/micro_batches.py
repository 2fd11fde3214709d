"""One batch for the objective and micro-batches for the model, from a step's groups.

The objective sees all completions at once, as rows of one batch; the model sees runs of rows of
similar length. A row is its number, which joins the two, so that neither the order nor the size of
micro-batches can change a result.

Tokens that the policy did not draw, a task's replies, are input for the model and nothing else: the
objective's rows hold the drawn tokens alone, one after the other, so that no objective can count the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.intake.group_verdict import full_logprobs
from learner.objective.batch import ObjectiveBatch
from node.values.groups.rollout import RolloutGroup


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows, padded on the right."""

    places: Tensor
    """[targets], int64: where the logprobs belong in the objective's [n, t], flattened."""
    input_ids: Tensor
    """[rows, length]"""
    positions: Tensor
    """[targets], int64: where in the flattened ``input_ids`` a drawn token is predicted."""
    target_ids: Tensor
    """[targets], those tokens, row after row; of real actions, their values."""
    temperature: Tensor
    """[targets]"""


Cut = Callable[[Sequence[int]], list[list[int]]]
"""Cuts rows into micro-batches."""


def row_lengths(groups: Sequence[RolloutGroup]) -> list[int]:
    """Return how many positions of each row the model sees: its last token is only ever a target."""
    return [
        len(group.prompt_token_ids) + len(completion.token_ids) - 1
        for group in groups
        for completion in group.completions
    ]


def objective_batch(
    groups: Sequence[RolloutGroup],
    *,
    version: int,
    discount: Callable[[int], float],
    dtype: torch.dtype,
    device: torch.device,
) -> ObjectiveBatch:
    """Return the objective's batch; the learner's logprobs, a leaf, hold the behaviour's for now.

    Args:
        groups: whole, at least one; where logprobs are renormalised, with kept masses.
        discount: weight of a group of some staleness, in versions.
        dtype: of token logprobs. Rewards and discounts are float64.
    """
    completions = [completion for group in groups for completion in group.completions]
    sizes = [len(group.completions) for group in groups]
    staleness = np.array([version - group.oldest_version for group in groups])
    lengths = np.array([completion.drawn_tokens for completion in completions])
    mask = np.arange(lengths.max()) < lengths[:, None]
    behaviour = np.zeros(mask.shape, np.float32)
    behaviour[mask] = np.concatenate([logprob for group in groups for logprob in full_logprobs(group)])
    behaviour_logprob = torch.from_numpy(behaviour).to(device, dtype)

    def per_completion(of_group: Sequence[float] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.repeat(of_group, sizes)).to(device)

    return ObjectiveBatch(
        learner_logprob=behaviour_logprob.clone().requires_grad_(),
        behaviour_logprob=behaviour_logprob,
        mask=torch.from_numpy(mask).to(device),
        group_index=per_completion(np.arange(len(groups))),
        reward=torch.tensor([completion.reward for completion in completions], dtype=torch.float64).to(
            device
        ),
        staleness_versions=per_completion(staleness),
        max_tokens=max(group.sampling.max_new_tokens for group in groups),
        discount=per_completion([discount(int(age)) for age in staleness]),
    )


def micro_batches(rows: Sequence[int], *, lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Cut rows into runs of similar length whose padded size is within the budget.

    Longest first, so that a run's first row sets its width; a row longer than the budget is alone.
    """
    cut: list[list[int]] = []
    width = 0
    for row in sorted(rows, key=lengths.__getitem__, reverse=True):
        if cut and width * (len(cut[-1]) + 1) <= budget_tokens:
            cut[-1].append(row)
        else:
            cut.append([row])
            width = lengths[row]
    return cut


def even_micro_batches(
    rows: Sequence[int], *, lengths: Sequence[int], budget_tokens: int, parts: int
) -> list[list[int]]:
    """Cut rows into runs of as many, within the budget if all are as long as the longest.

    At least ``parts`` runs, if there are as many rows.
    """
    by_length = sorted(rows, key=lengths.__getitem__, reverse=True)
    if not by_length:
        return []
    each = max(1, min(budget_tokens // lengths[by_length[0]], len(rows) // parts))
    return [by_length[first : first + each] for first in range(0, len(rows), each)]


def share_out(lengths: Sequence[int], *, shares: int, cut: Cut) -> list[list[list[int]]]:
    """Return as many micro-batches of a step's rows for each of ``shares`` ranks; some may be empty.

    Rows are dealt by length, there and back, so that every share has about as many tokens: in whole
    micro-batches, all ranks wait for the slowest.

    Args:
        cut: ``micro_batches`` or ``even_micro_batches``.
    """
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    turn = [*range(shares), *reversed(range(shares))]
    dealt: list[list[int]] = [[] for _ in range(shares)]
    for place, row in enumerate(by_length):
        dealt[turn[place % len(turn)]].append(row)
    runs = [cut(own) for own in dealt]
    most = max(len(of_rank) for of_rank in runs)
    return [of_rank + [[] for _ in range(most - len(of_rank))] for of_rank in runs]


def collate(
    groups: Sequence[RolloutGroup],
    rows: Sequence[int],
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MicroBatch:
    """Pad some rows of ``groups`` to one length; ``width`` is t of the objective's [n, t].

    Without rows, one token that nothing is asked of: a rank that waits for the others runs the model too.
    """
    if not rows:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        idle = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return MicroBatch(nothing, idle, nothing, nothing, nothing.to(dtype))
    group_of = [group for group in groups for _ in group.completions]
    every = [completion for group in groups for completion in group.completions]
    own_groups, completions = [group_of[row] for row in rows], [every[row] for row in rows]
    prompts = [group.prompt_token_ids for group in own_groups]
    generated = np.array([len(completion.token_ids) for completion in completions])
    lengths = np.array([len(prompt) for prompt in prompts]) + generated - 1
    is_drawn = np.concatenate([completion.drawn for completion in completions])
    drawn = np.array([completion.drawn_tokens for completion in completions])
    position, place = np.arange(lengths.max()), np.arange(width)
    is_token = position < lengths[:, None]
    input_ids = np.zeros(is_token.shape, np.int64)
    # The last token of a row is only ever a target.
    input_ids[is_token] = np.concatenate(
        [
            ids
            for prompt, completion in zip(prompts, completions, strict=True)
            for ids in (prompt, completion.token_ids[:-1])
        ]
    )
    is_target = is_token & (position >= (lengths - generated)[:, None])
    is_target[is_target] = is_drawn
    starts = np.array(rows)[:, None] * width
    targets = np.concatenate([c.token_ids if c.actions is None else c.actions for c in completions])[is_drawn]
    temperature = np.repeat([group.sampling.temperature for group in own_groups], drawn)
    return MicroBatch(
        places=torch.from_numpy((starts + place)[place < drawn[:, None]]).to(device),
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.from_numpy(np.flatnonzero(is_target)).to(device),
        target_ids=torch.from_numpy(targets).to(device, dtype if targets.dtype.kind == "f" else torch.int64),
        temperature=torch.from_numpy(temperature).to(device, dtype),
    )


def padded(part: MicroBatch, *, rows: int, length: int) -> MicroBatch:
    """Pad a micro-batch to a shape; nothing is asked of what is added."""
    held, width = part.input_ids.shape
    ids = torch.nn.functional.pad(part.input_ids, (0, length - width, 0, rows - held))
    row, column = part.positions // width, part.positions % width
    return replace(part, input_ids=ids, positions=row * length + column)
