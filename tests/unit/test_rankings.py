"""Rankings as completions: Plackett-Luce's probabilities, and what no ranking policy can have made."""

import tracemalloc
from itertools import permutations

import numpy as np
import pytest

from node.errors import Reason
from node.kinds.ranking.values import as_text, pairs_of, prompt_of, ranking_logprob, read_text
from support.refusals import refused

SCORES = np.array([1.0, 0.0, -1.0])
PROBABILITIES = {
    (0, 1, 2): 0.486330,
    (1, 0, 2): 0.215556,
    (0, 2, 1): 0.178911,
    (2, 0, 1): 0.065818,
    (1, 2, 0): 0.029172,
    (2, 1, 0): 0.024213,
}
"""Probabilities under 2310.04407's policy with these scores."""


def test_the_probability_of_every_ranking_is_the_papers() -> None:
    orders = np.array(list(PROBABILITIES))
    found = np.exp(ranking_logprob(SCORES, orders).sum(axis=-1))
    np.testing.assert_allclose(found, list(PROBABILITIES.values()), atol=1e-6)
    assert ranking_logprob(SCORES, np.array([0, 1, 2])).sum() == pytest.approx(-0.720868, abs=1e-6)


@pytest.mark.parametrize("ranked", [1, 2, 3, 4])
def test_the_first_positions_alone_have_the_probability_of_all_rankings_that_begin_so(ranked: int) -> None:
    scores = np.array([0.3, -1.2, 2.0, 0.0])
    whole = np.array(list(permutations(range(4))))
    probability = np.exp(ranking_logprob(scores, whole).sum(axis=-1))
    for first in permutations(range(4), ranked):
        begins = (whole[:, :ranked] == first).all(axis=-1)
        alone = np.exp(ranking_logprob(scores, np.array(first)).sum())
        assert alone == pytest.approx(probability[begins].sum(), abs=1e-12)


def test_a_prompt_is_read_back_as_its_pairs() -> None:
    prompt = prompt_of([5, 6], [[7], [8, 9, 10], [7, 7]], separator=1)
    pairs = pairs_of(prompt, separator=1, padding=0)
    assert pairs.lengths.tolist() == [4, 6, 5]
    assert pairs.input_ids.tolist() == [[5, 6, 1, 7, 0, 0], [5, 6, 1, 8, 9, 10], [5, 6, 1, 7, 7, 0]]


@pytest.mark.parametrize("ids", [[], [5], [5, 1], [5, 1, 6], [5, 1, 1], [1, 6, 1], [5, 1, 6, 1, 1], [1]])
def test_what_is_not_a_query_with_candidates_is_refused(ids: list[int]) -> None:
    with refused(Reason.MALFORMED):
        pairs_of(np.array(ids, np.int32), separator=1, padding=0)


def test_a_long_query_with_very_many_candidates_is_refused_before_its_pairs_are_made() -> None:
    """A quarter of a million tokens, whose pairs would have 17 thousand million."""
    prompt = np.array([5] * (1 << 17) + [1] + [6, 1] * (1 << 17), np.int32)
    tracemalloc.start()
    try:
        with refused(Reason.OVER_LIMIT, "131072", "4194304"):
            pairs_of(prompt, separator=1, padding=0, pair_tokens=1 << 30)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 10 * prompt.nbytes


def test_a_pair_that_is_longer_than_the_model_takes_is_refused() -> None:
    prompt = prompt_of([5, 6], [[7], [8, 9, 10]], separator=1)
    assert len(pairs_of(prompt, separator=1, padding=0, pair_tokens=6).lengths) == 2
    with refused(Reason.OVER_LIMIT, "6", "5"):
        pairs_of(prompt, separator=1, padding=0, pair_tokens=5)


@pytest.mark.parametrize("texts", [([5], []), ([], [[6]]), ([5], [[6], []]), ([5, 1], [[6]]), ([5], [[1]])])
def test_empty_texts_and_texts_with_the_separator_make_no_prompt(
    texts: tuple[list[int], list[list[int]]],
) -> None:
    with refused(Reason.MALFORMED):
        prompt_of(*texts, separator=1)


@pytest.mark.parametrize("prompt", ["1+1=", "[]", '{"query": 1, "candidates": []}', [{"role": "user"}], "{"])
def test_another_tasks_prompt_is_refused_with_what_to_do(prompt: object) -> None:
    with refused(Reason.MALFORMED, "ranking"):
        read_text(prompt)


def test_a_query_with_candidates_is_read_as_it_was_written() -> None:
    assert read_text(as_text("wo?", ["hier", "ü"])) == ("wo?", ["hier", "ü"])
