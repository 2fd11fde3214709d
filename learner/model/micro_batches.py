"""One batch for the objective and micro-batches for the model, from a step's groups.

The objective sees all completions at once, as rows of one batch; the model sees packs of rows (``pack``), or
runs of rows of similar length, padded. A row is its number, which joins the two, so that neither the order
nor the size of micro-batches can change a result.

Tokens that the policy did not draw, a task's replies, are input for the model and nothing else: the
objective's rows hold the drawn tokens alone, one after the other, so that no objective can count the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.intake.group_verdict import full_logprobs
from learner.model.pack import Pack
from learner.model.prefix_tree import Tokens
from learner.objective.batch import ObjectiveBatch
from node.values.groups.rollout import Completion, RolloutGroup


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows, padded on the right; or a pack of them, which is one."""

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
    pack: Pack | None = None

    @property
    def asked(self) -> tuple[Any, ...]:
        """The arguments of a scorer besides the inputs."""
        asked = (self.positions, self.target_ids, self.temperature)
        return asked if self.pack is None else (*asked, self.pack)


_IDLE: Final = np.zeros(1, np.int64)
"""A row that nothing is asked of: a rank that waits for the others runs the model too."""


def token_rows(groups: Sequence[RolloutGroup]) -> list[Tokens]:
    """Return the tokens of each row that the model reads, a completion each."""
    return [_tokens_read(group, completion) for group in groups for completion in group.completions]


def _tokens_read(group: RolloutGroup, completion: Completion) -> Tokens:
    """Return the tokens of a row that the model reads: its last one is only ever a target."""
    return np.concatenate([group.prompt_token_ids, completion.token_ids[:-1]])


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


def collate(
    groups: Sequence[RolloutGroup],
    rows: Sequence[int],
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = False,
) -> MicroBatch:
    """Lay out some rows of ``groups``; ``width`` is t of the objective's [n, t].

    Without rows, one token that nothing is asked of: a rank that waits for the others runs the model too.

    Args:
        packed: into a pack, else padded to one length.
    """
    every = [(group, completion) for group in groups for completion in group.completions]
    own = [every[row] for row in rows]
    read = [_tokens_read(*one) for one in own] or [_IDLE]
    pack = Pack(read, device) if packed else None
    input_ids, paths = _padded_rows(read, device) if pack is None else (pack.input_ids, pack.paths)
    # A token is predicted where the one before it is read.
    predicting = [path[-len(c.token_ids) :][c.drawn] for path, (_, c) in zip(paths, own, strict=False)]
    places = [row * width + np.arange(len(where)) for row, where in zip(rows, predicting, strict=True)]
    targets = [c.of_drawn(c.token_ids if c.actions is None else c.actions) for _, c in own]
    temperatures = [np.full(c.drawn_tokens, group.sampling.temperature) for group, c in own]

    def flat(parts: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts) if parts else _IDLE[:0]).to(device)

    is_real = any(c.actions is not None for _, c in own)
    return MicroBatch(
        places=flat(places),
        input_ids=input_ids,
        positions=flat(predicting),
        target_ids=flat(targets).to(dtype if is_real else torch.int64),
        temperature=flat(temperatures).to(dtype),
        pack=pack,
    )


def _padded_rows(rows: Sequence[Tokens], device: torch.device) -> tuple[Tensor, list[NDArray[np.int64]]]:
    """Return rows padded to the longest, [rows, length]; and where each one's tokens are, flattened."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    paths = [number * ids.shape[1] + np.arange(len(tokens)) for number, tokens in enumerate(rows)]
    return torch.from_numpy(ids).to(device), paths


def padded(part: MicroBatch, *, rows: int, length: int) -> MicroBatch:
    """Pad a micro-batch to a shape; nothing is asked of what is added."""
    held, width = part.input_ids.shape
    ids = torch.nn.functional.pad(part.input_ids, (0, length - width, 0, rows - held))
    row, column = part.positions // width, part.positions % width
    return replace(part, input_ids=ids, positions=row * length + column)
