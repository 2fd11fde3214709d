"""A model that gives a score to each pair of query and candidate, asked for logprobs of rankings.

A micro-batch is that of token models: rows of prompt and ranking, and where its actions are. The prompts of
a group's rankings are one, and are scored once.
"""

from collections.abc import Iterable

import numpy as np
import torch
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
        return super().objection(group) or objection(
            group, separator=self.separator, pair_tokens=self._pair_tokens
        )

    def forward(self, inputs: Tensor, positions: Tensor, target_ids: Tensor, temperature: Tensor) -> Tensor:
        """Return log p of the candidate at each position of the rankings; see ``Scorer.forward``."""
        ids, places = inputs.cpu().numpy(), positions.cpu().numpy()
        rows, starts, ranked = np.unique(places // ids.shape[1], return_index=True, return_counts=True)
        if not len(rows):  # a rank that waits for the others runs the model too
            idle = Pairs(np.zeros((1, 1), np.int64), np.ones(1, np.int64))
            return temperature + 0.0 * self._scores(idle, inputs.device).sum()
        ends = places[starts] % ids.shape[1] + 1
        prompts = [ids[row, :end].tobytes() for row, end in zip(rows, ends, strict=True)]
        scores = self._scores_by_prompt(dict.fromkeys(prompts), inputs.device)
        orders = torch.split(target_ids, ranked.tolist())
        temperatures = temperature[torch.from_numpy(starts).to(temperature.device)]
        return torch.cat(
            [
                _ranking_logprob(scores[prompt] / of_row, order)
                for prompt, order, of_row in zip(prompts, orders, temperatures, strict=True)
            ]
        )

    def _scores_by_prompt(self, prompts: Iterable[bytes], device: torch.device) -> dict[bytes, Tensor]:
        """Return the scores of each prompt's candidates, of one pass over all of them."""
        pairs = {
            prompt: pairs_of(np.frombuffer(prompt, np.int64), separator=self.separator, padding=self.padding)
            for prompt in prompts
        }
        longest = max(one.input_ids.shape[1] for one in pairs.values())
        input_ids = [
            np.pad(ids, ((0, 0), (0, longest - ids.shape[1])), constant_values=self.padding)
            for ids, _ in pairs.values()
        ]
        lengths = [one.lengths for one in pairs.values()]
        scores = self._scores(Pairs(np.concatenate(input_ids), np.concatenate(lengths)), device)
        of_prompts = torch.split(scores, list(map(len, lengths)))
        return dict(zip(pairs, of_prompts, strict=True))

    def _scores(self, pairs: Pairs, device: torch.device) -> Tensor:
        ids = torch.from_numpy(pairs.input_ids).to(device)
        lengths = torch.from_numpy(pairs.lengths).to(ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with torch.autocast(
            ids.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not None
        ):
            scores: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _ranking_logprob(scores: Tensor, order: Tensor) -> Tensor:
    """Return log p at each position of one ranking, [ranked]; as ``node.rankings.ranking_logprob``."""
    chosen = scores[order]
    # Those never ranked, then the ranked from the last one backwards: sums over what is left at a position.
    rest = scores.index_fill(0, order, -torch.inf).logsumexp(dim=0, keepdim=True)
    left = chosen.flip(0) if len(order) == len(scores) else torch.cat([rest, chosen.flip(0)])
    return chosen - left.logcumsumexp(dim=0)[-len(order) :].flip(0)
