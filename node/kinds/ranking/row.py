"""A row of the task ``ranking``: a query, candidates, and how relevant each is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from node.questions.data_row import RowError, found_in
from node.questions.json_values import has_whole_characters, kind_of_value
from node.tasks.task_options import TaskOptions
from node.values.limits import PROMPT_TOKENS


class RankingOptions(TaskOptions):
    """Options of ``ranking``: queries, candidates and their relevance are columns of the rows."""

    takes_rows = True

    query: str = "query"
    """Column with the query's text. See ``column_of`` for what is inside one."""
    candidates: str = "candidates"
    """Column with the candidates, a list of texts."""
    relevance: str = "relevance"
    """Column with a number for each candidate, at least 0; some must be above."""
    metric: Literal["ndcg", "mrr", "recall"] = "ndcg"
    """The reward: normalised discounted cumulative gain, the inverse rank of the first relevant candidate, or
    the share of the relevant ones among the first ``k``."""
    k: int = Field(default=10, ge=1, le=4096)
    """Positions that count."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, le=PROMPT_TOKENS)
    """Queries with candidates of more tokens together are set aside as ``prompt_too_long``."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {"query": self.query, "candidates": self.candidates, "relevance": self.relevance}

    def check_row(self, row: Mapping[str, Any]) -> None:
        ranking_row(row, self)


@dataclass(frozen=True, slots=True)
class RankingRow:
    query: str
    candidates: list[str]
    relevance: list[float]
    """At least 0 each, and above 0 for some."""


def ranking_row(row: Mapping[str, Any], options: RankingOptions) -> RankingRow:
    """Return what a row asks to be ranked; RowError where it is something else."""
    query, candidates = found_in(row, options.query), found_in(row, options.candidates)
    if not isinstance(query, str):
        raise RowError(options.query, f"is {kind_of_value(query)}, not a text", value=query)
    if not query.strip():
        raise RowError(options.query, "is empty")
    if not isinstance(candidates, list):
        raise RowError(options.candidates, f"is {kind_of_value(candidates)}, not a list of texts")
    if not candidates:
        raise RowError(options.candidates, "is an empty list")
    for candidate in candidates:
        if not isinstance(candidate, str):
            raise RowError(
                options.candidates, f"has {kind_of_value(candidate)} in it, not a text", value=candidate
            )
        if not candidate.strip():
            raise RowError(options.candidates, "has an empty text in it")
    if not all(map(has_whole_characters, (query, *candidates))):
        raise RowError(options.candidates, "has half of a surrogate pair in it or in its query")
    return RankingRow(query, candidates, _relevance(found_in(row, options.relevance), candidates, options))


def _relevance(found: object, candidates: list[str], options: RankingOptions) -> list[float]:
    name = options.relevance
    if not isinstance(found, list) or len(found) != len(candidates):
        raise RowError(name, "is not a list of a number for each candidate", value=found)
    if not all(isinstance(value, int | float) for value in found):
        raise RowError(name, "has something else in it than numbers", value=found)
    try:
        relevance = [float(value) for value in found]
    except OverflowError as error:
        raise RowError(name, "has a number in it that is too large") from error
    if not all(math.isfinite(value) and value >= 0 for value in relevance):
        raise RowError(name, "has numbers in it that are below 0 or infinite", value=found)
    if not any(relevance):
        raise RowError(name, "has no number above 0 in it: every order is worth the same", value=found)
    return relevance
