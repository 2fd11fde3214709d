"""The task ``ranking``: candidates are put in order, and the order is graded by their relevance."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from node.grading.completion import CompletionText, Graded, Row
from node.kinds.ranking.row import RankingOptions, ranking_row
from node.kinds.ranking.values import as_text


def ndcg(relevance: Sequence[float], order: Sequence[int], k: int) -> float:
    """Return the discounted cumulative gain of the first ``k``, over the largest there can be: [0, 1]."""
    best = sorted(relevance, reverse=True)
    return _gain([relevance[number] for number in order[:k]]) / _gain(best[:k])


def mrr(relevance: Sequence[float], order: Sequence[int], k: int) -> float:
    """Return 1 / position of the first relevant candidate among the first ``k``; 0: there is none."""
    return next((1 / (place + 1) for place, number in enumerate(order[:k]) if relevance[number] > 0), 0.0)


def recall(relevance: Sequence[float], order: Sequence[int], k: int) -> float:
    """Return the share of the relevant candidates that are among the first ``k``."""
    return sum(relevance[number] > 0 for number in order[:k]) / sum(value > 0 for value in relevance)


METRICS: Final[Mapping[str, Callable[[Sequence[float], Sequence[int], int], float]]] = {
    "ndcg": ndcg,
    "mrr": mrr,
    "recall": recall,
}


class RankingTask:
    """One query with candidates for each row; all three metrics are told, one is the reward."""

    prompts = None
    noise_ratio = 0.0

    def __init__(self, **options: Any) -> None:
        self._options = given = RankingOptions.model_validate(options)
        self.max_prompt_tokens = given.max_prompt_tokens

    def prompt(self, index: int, row: Row | None) -> str:
        asked = ranking_row(row or {}, self._options)
        return as_text(asked.query, asked.candidates)

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> Graded:
        order = [int(number) for number in completion.text.split()]
        relevance = ranking_row(row or {}, self._options).relevance
        scores = {name: metric(relevance, order, self._options.k) for name, metric in METRICS.items()}
        return scores[self._options.metric], scores


def _gain(relevance: Sequence[float]) -> float:
    return sum(value / math.log2(place + 2) for place, value in enumerate(relevance))


TASK: Final = RankingTask
OPTIONS: Final = RankingOptions
