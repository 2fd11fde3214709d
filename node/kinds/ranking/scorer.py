"""A model that gives a score to each pair of query and candidate, asked for logprobs of rankings.

A micro-batch is that of token models: rows of prompt and ranking, and where its actions are. Its size counts
what the model reads: the pairs of a group's prompt, which are scored once for all of its rankings in it.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from learner.model.scorer import UNBOUNDED, Scorer
from node.kinds.ranking.values import (
    PAIRED_TOKENS,
    Pairs,
    joined,
    objection,
    pair_lengths,
    pairs_of,
    separator_of,
)
from node.values.groups.rollout import RolloutGroup

_NO_CANDIDATE: Final = -1e20
"""Score that no sum sees. An infinite one would have no gradient where all candidates are ranked."""


class RankingScorer(Scorer):
    """A sequence classifier with one label; see ``values``."""

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

    def row_tokens(self, groups: Sequence[RolloutGroup]) -> list[int]:
        """Return each ranking's share of its group's pairs, which are read once for all of them."""
        tokens = []
        for group in groups:
            lengths = pair_lengths(
                group.prompt_token_ids, separator=self.separator, pair_tokens=self._pair_tokens
            )
            rows = len(group.completions)
            tokens += [math.ceil(lengths.max() * len(lengths) / rows)] * rows
        return tokens

    def forward(self, inputs: Tensor, positions: Tensor, target_ids: Tensor, temperature: Tensor) -> Tensor:
        """Return log p of the candidate at each position of the rankings; see ``Scorer.forward``."""
        ids, places = inputs.cpu().numpy(), positions.cpu().numpy()
        rows, starts, ranked = np.unique(places // ids.shape[1], return_index=True, return_counts=True)
        if not len(rows):  # a rank that waits for the others runs the model too
            idle = Pairs(np.zeros((1, 1), np.int64), np.ones(1, np.int64))
            return temperature + 0.0 * self._scores(idle, inputs.device).sum()
        ends = places[starts] % ids.shape[1] + 1
        prompts = [ids[row, :end].tobytes() for row, end in zip(rows, ends, strict=True)]
        distinct = list(dict.fromkeys(prompts))
        scores = self._scores_of(distinct, inputs.device)
        is_ranked = torch.from_numpy(np.arange(ranked.max()) < ranked[:, None]).to(inputs.device)
        # The last column of the scores belongs to no candidate.
        order = target_ids.new_full(is_ranked.shape, scores.shape[1] - 1)
        order[is_ranked] = target_ids
        number = {prompt: n for n, prompt in enumerate(distinct)}
        of_rows = torch.tensor([number[prompt] for prompt in prompts], device=inputs.device)
        temperatures = temperature[torch.from_numpy(starts).to(temperature.device)]
        return ranking_logprobs(scores[of_rows] / temperatures[:, None], order)[is_ranked]

    def _scores_of(self, prompts: Sequence[bytes], device: torch.device) -> Tensor:
        """Return the scores of each prompt's candidates, [prompts, most candidates + 1], padded.

        All pairs go through the model at once, unless padding makes them more than PAIRED_TOKENS.
        """
        pairs = [
            pairs_of(np.frombuffer(prompt, np.int64), separator=self.separator, padding=self.padding)
            for prompt in prompts
        ]
        shapes = [one.input_ids.shape for one in pairs]
        passes: list[list[int]] = [[]]
        count = 0
        for number in sorted(range(len(pairs)), key=lambda number: shapes[number][1]):
            candidates, longest = shapes[number]
            if passes[-1] and (count + candidates) * longest > PAIRED_TOKENS:
                passes.append([])
                count = 0
            passes[-1].append(number)
            count += candidates
        scores: dict[int, Tensor] = {}
        for numbers in passes:
            of_pass = self._scores_of_pass([pairs[number] for number in numbers], device)
            scores |= zip(numbers, of_pass, strict=True)
        in_order = [scores[number] for number in range(len(pairs))]
        padded = pad_sequence(in_order, batch_first=True, padding_value=_NO_CANDIDATE)
        return pad(padded, (0, 1), value=_NO_CANDIDATE)

    def _scores_of_pass(self, pairs: Sequence[Pairs], device: torch.device) -> Sequence[Tensor]:
        scores = self._scores(joined(pairs, padding=self.padding), device)
        return torch.split(scores, [len(one.lengths) for one in pairs])

    def _scores(self, pairs: Pairs, device: torch.device) -> Tensor:
        ids = torch.from_numpy(pairs.input_ids).to(device)
        lengths = torch.from_numpy(pairs.lengths).to(ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with torch.autocast(
            ids.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not None
        ):
            scores: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def ranking_logprobs(scores: Tensor, order: Tensor) -> Tensor:
    """Return log p at each position of rankings, [rankings, ranked]; as ``values.ranking_logprob``.

    Args:
        scores: [rankings, candidates], _NO_CANDIDATE where there is none.
        order: [rankings, ranked], of such where a ranking has ended.
    """
    chosen = scores.gather(1, order)
    # Those never ranked, then the ranked from the last one backwards: sums over what is left at a position.
    rest = scores.scatter(1, order, _NO_CANDIDATE).logsumexp(dim=1, keepdim=True)
    left = torch.cat([rest, chosen.flip(1)], dim=1).logcumsumexp(dim=1)
    return chosen - left[:, 1:].flip(1)
