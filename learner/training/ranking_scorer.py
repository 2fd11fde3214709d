"""A model that gives a score to each pair of query and candidate, asked for logprobs of rankings.

A micro-batch is that of token models: rows of prompt and ranking, and where its actions are. The prompts of
a group's rankings are one, and are scored once.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from learner.training.scorer import UNBOUNDED, Scorer
from node.rankings import Pairs, objection, pairs_of, separator_of
from node.rollout import RolloutGroup


class RankingScorer(Scorer):
    """A sequence classifier with one label; see ``node.rankings``."""

    def __init__(self, model: PreTrainedModel, *, compute_dtype: torch.dtype | None) -> None:
        """Wrap ``model``, which stays in evaluation mode."""
        super().__init__(model, compute_dtype=compute_dtype)
        self.separator = separator_of(model.config.to_dict())
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.separator
        self.padding: int = model.config.pad_token_id
        self._pair_tokens, self.context_tokens = self.context_tokens, UNBOUNDED

    def objection(self, group: RolloutGroup) -> str | None:
        return objection(group, separator=self.separator, pair_tokens=self._pair_tokens)

    def forward(self, inputs: Tensor, positions: Tensor, target_ids: Tensor, temperature: Tensor) -> Tensor:
        """Return log p of the candidate at each position of the rankings; see ``Scorer.forward``."""
        ids = inputs.cpu().numpy()
        rows, starts = np.unique(positions.cpu().numpy() // ids.shape[1], return_index=True)
        if not len(rows):  # a rank that waits for the others runs the model too
            idle = Pairs(np.zeros((1, 1), np.int64), np.ones(1, np.int64))
            return temperature + 0.0 * self._scores(idle, inputs.device).sum()
        firsts = positions[torch.from_numpy(starts)].cpu().numpy() % ids.shape[1]
        prompts = [ids[row, : first + 1].tobytes() for row, first in zip(rows, firsts, strict=True)]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        pairs = [
            pairs_of(np.frombuffer(prompt, ids.dtype), separator=self.separator, padding=self.padding)
            for prompt in numbers
        ]
        scores = self._scores(_joined(pairs, self.padding), inputs.device).split(
            [len(one.lengths) for one in pairs]
        )
        parts = torch.from_numpy(np.append(starts[1:], len(positions))).diff(prepend=torch.zeros(1).long())
        rankings = zip(target_ids.split(parts.tolist()), temperature.split(parts.tolist()), strict=True)
        return torch.cat(
            [
                _ranking_logprob(scores[numbers[prompt]], order, scale)
                for prompt, (order, scale) in zip(prompts, rankings, strict=True)
            ]
        )

    def _scores(self, pairs: Pairs, device: torch.device) -> Tensor:
        ids = torch.from_numpy(pairs.input_ids).to(device)
        lengths = torch.from_numpy(pairs.lengths).to(ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with torch.autocast(
            ids.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not None
        ):
            scores: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _ranking_logprob(scores: Tensor, order: Tensor, temperature: Tensor) -> Tensor:
    """Return log p at each position of one ranking: [ranked]."""
    scaled = scores / temperature[0]
    rest = scaled.index_fill(0, order, -torch.inf).logsumexp(dim=0, keepdim=True)
    chosen = scaled[order]
    remaining = torch.cat([rest, chosen.flip(0)]) if len(order) < len(scores) else chosen.flip(0)
    sums = remaining.logcumsumexp(dim=0)[-len(order) :].flip(0)
    return chosen - sums


def _joined(pairs: list[Pairs], padding: int) -> Pairs:
    """Return the candidates of all prompts, padded to one length."""
    longest = max(one.input_ids.shape[1] for one in pairs)
    padded: list[NDArray[np.int64]] = [
        np.pad(one.input_ids, ((0, 0), (0, longest - one.input_ids.shape[1])), constant_values=padding)
        for one in pairs
    ]
    return Pairs(np.concatenate(padded), np.concatenate([one.lengths for one in pairs]))
