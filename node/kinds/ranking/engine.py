"""The ranking engine: a sequence classifier with one label, whose scores rankings are drawn from.

A request is a query with its candidates (``values``). A step scores the candidates of some requests
and draws all of their rankings, best first from scores with Gumbel noise: nothing runs across versions.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from node.kinds.ranking.tokenizer import RankingTokenizer
from node.kinds.ranking.values import (
    PAIRED_TOKENS,
    Pairs,
    joined,
    pairs_of,
    prompt_of,
    ranking_logprob,
    separator_of,
)
from node.kinds.registry import model_config
from node.values.groups.rollout import Completion, Finish
from sampler.engines.engine import EngineSettings, GenerationRequest
from sampler.engines.torch.live_model import LiveModel
from sampler.engines.torch.whole_request_engine import ROWS_AT_ONCE, WholeRequestEngine, refuse_truncation


class RankingEngine(WholeRequestEngine):
    """See ``sampler.engines.engine.Engine``."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the base model as version 0.

        Raises:
            StartupError: as ``LiveModel.load``.
        """
        loaded = LiveModel.of(AutoModelForSequenceClassification, settings)
        super().__init__(loaded)
        self._separator = separator_of(model_config(settings.model_dir))
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._separator
        self.tokenizer = RankingTokenizer(loaded.tokenizer, separator=self._separator)
        # A query with two candidates, of neither token that has a meaning of its own.
        ordinary = [n for n in range(5) if n not in (self._separator, self._model.config.pad_token_id)]
        self.probe = prompt_of(ordinary[:1], [ordinary[1:2], ordinary[2:3]], separator=self._separator)

    def check(self, request: GenerationRequest) -> None:
        refuse_truncation(
            request.sampling, drawn="a ranking is drawn from all candidates, or greedily with top_k = 1"
        )
        self._pairs(request.prompt_token_ids)

    def rows(self, request: GenerationRequest) -> int:
        return int((request.prompt_token_ids == self._separator).sum()) - 1

    def drawn(self, requests: Sequence[GenerationRequest]) -> Iterable[Iterable[Completion]]:
        pairs = joined(
            [self._pairs(request.prompt_token_ids) for request in requests],
            padding=self._model.config.pad_token_id,
        )
        of_passes = [self._scores(pairs, first) for first in range(0, len(pairs.lengths), ROWS_AT_ONCE)]
        ends = np.cumsum([self.rows(request) for request in requests])[:-1]
        scores = np.split(np.concatenate(of_passes).astype(np.float64), ends)
        return map(self._rankings, requests, scores)

    def _rankings(self, request: GenerationRequest, scores: NDArray[np.float64]) -> Iterator[Completion]:
        sampling = request.sampling
        scores = scores / sampling.temperature
        ranked = min(len(scores), sampling.max_new_tokens)
        noise = 0.0 if sampling.top_k else self._random.gumbel(size=(request.wanted, len(scores)))
        orders = np.broadcast_to(np.argsort(-(scores + noise), axis=-1), (request.wanted, len(scores)))
        orders = np.ascontiguousarray(orders[:, :ranked], np.int32)
        logprobs = ranking_logprob(scores, orders).astype(np.float32)
        for order, logprob in zip(orders, logprobs, strict=True):
            yield Completion(
                token_ids=order,
                # What greed chose was certain, among what top_k kept.
                behaviour_logprob=np.zeros_like(logprob) if sampling.top_k else logprob,
                policy_version=np.full(ranked, self._version, np.int32),
                finish=Finish.END,
                kept_mass=np.exp(logprob) if sampling.top_k else None,
            )

    def _pairs(self, prompt: NDArray[np.int32]) -> Pairs:
        config = self._model.config
        limit = getattr(config.get_text_config(), "max_position_embeddings", None) or PAIRED_TOKENS
        return pairs_of(prompt, separator=self._separator, padding=config.pad_token_id, pair_tokens=limit)

    def _scores(self, pairs: Pairs, first: int) -> NDArray[np.float32]:
        rows = slice(first, first + ROWS_AT_ONCE)
        device = self._model.device
        mask = np.arange(pairs.input_ids.shape[1]) < pairs.lengths[rows, None]
        logits = self._model(
            input_ids=torch.from_numpy(pairs.input_ids[rows]).to(device),
            attention_mask=torch.from_numpy(mask.astype(np.int64)).to(device),
        ).logits
        scores: NDArray[np.float32] = logits[:, 0].float().cpu().numpy()
        return scores
