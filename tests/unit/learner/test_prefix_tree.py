"""Rows in the order of their tokens, and what packs of them read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.model.prefix_tree import PrefixTree, Tokens

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
"""Few tokens, so that rows are equal, begin alike, or are the beginning of another."""


def arrays(rows: list[list[int]]) -> list[Tokens]:
    return [np.array(row, np.int32) for row in rows]


def distinct(rows: list[list[int]]) -> int:
    """Count the beginnings of rows that differ."""
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def test_a_row_has_of_its_own_what_the_one_before_it_does_not() -> None:
    tree = PrefixTree.of(arrays([[1, 2, 3], [1, 9], [1, 2, 3, 4], [1, 2, 3], [300, 1]]))
    assert tree.order == (0, 3, 2, 1, 4)
    assert tree.lengths == (3, 3, 4, 2, 2)
    assert tree.shared == (0, 3, 3, 1, 0)


@given(ROWS)
def test_every_token_that_differs_or_follows_one_is_read_once(rows: list[list[int]]) -> None:
    assert PrefixTree.of(arrays(rows)).distinct_tokens == distinct(rows)


@given(ROWS, st.integers(1, 4), st.integers(1, 30), st.sampled_from([1, 3]))
def test_packs_have_every_row_once_within_the_budget_and_every_share_has_as_many(
    rows: list[list[int]], shares: int, budget: int, parts: int
) -> None:
    tree = PrefixTree.of(arrays(rows))
    shared = tree.share_out(shares=shares, budget_tokens=budget, parts=parts)
    assert len(shared) == shares
    assert len({len(share) for share in shared}) == 1
    packs = [[rows[row] for row in pack] for share in shared for pack in share]
    read = [tree.tokens_read(pack) for share in shared for pack in share]
    assert read == [distinct(pack) for pack in packs]
    assert sorted(row for share in shared for pack in share for row in pack) == list(range(len(rows)))
    for pack in packs:
        assert distinct(pack) <= budget or len({tuple(row) for row in pack}) == 1


def problems(seed: int, *, groups: int, prompt: tuple[int, int], tokens: tuple[int, int]) -> list[Tokens]:
    """Return the rows of groups of eight, with lengths between bounds."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        asked = random.integers(0, 1000, random.integers(*prompt))
        rows += [
            np.concatenate([asked, random.integers(0, 1000, random.integers(*tokens))]) for _ in range(8)
        ]
    return rows


def tokens_read(rows: list[Tokens], packs: list[list[int]]) -> int:
    return sum(PrefixTree.of([rows[row] for row in pack]).distinct_tokens for pack in packs if pack)


@pytest.mark.parametrize(
    ("prompt", "tokens", "budget"), [((40, 110), (10, 160), 1024), ((900, 1100), (50, 250), 4096)]
)
def test_packs_are_cut_where_little_is_read_twice(
    prompt: tuple[int, int], tokens: tuple[int, int], budget: int
) -> None:
    rows = problems(0, groups=32, prompt=prompt, tokens=tokens)
    tree = PrefixTree.of(rows)
    [packs] = tree.share_out(shares=1, budget_tokens=budget)
    assert tokens_read(rows, packs) <= 1.1 * tree.distinct_tokens
    assert len(packs) <= 2.5 * tree.distinct_tokens / budget


@pytest.mark.parametrize("shares", [2, 8])
def test_shares_have_about_as_many_tokens(shares: int) -> None:
    rows = problems(0, groups=32, prompt=(200, 300), tokens=(10, 160))
    tree = PrefixTree.of(rows)
    shared = tree.share_out(shares=shares, budget_tokens=4096)
    read = [tokens_read(rows, share) for share in shared]
    assert max(read) <= 1.15 * tree.distinct_tokens / shares


def test_more_shares_than_rows_leave_some_idle() -> None:
    shared = PrefixTree.of(arrays([[1, 2], [3, 4]])).share_out(shares=4, budget_tokens=9)
    assert sorted(shared) == [[[]], [[]], [[0]], [[1]]]
