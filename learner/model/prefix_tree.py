"""Rows of tokens that begin alike, as a tree: a token is read once where all tokens before it are shared too.

    rows, in order of their tokens     shared with the row before     own
    the cat sat                        0                              the cat sat
    the cat sat                        3
    the cat sat down                   3                              down
    the dog                            1                              dog

In this order a row shares the most with the row just before it. So each run of neighbouring rows is a tree
too, a pack, whose distinct tokens are the first row and what the others have of their own. The prompt of a
group, turns of a conversation and a text that begins every prompt are all the same to it.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from learner.model.step_rows import as_many_in_each

Tokens = NDArray[np.integer[Any]]
"""[tokens], ids from 0 to 2^32 - 1."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Rows, each at least one token long, in order of their tokens; equal rows in the order given."""

    order: tuple[int, ...]
    """Numbers of the rows as they were given."""
    lengths: tuple[int, ...]
    """Tokens of each, in that order."""
    shared: tuple[int, ...]
    """Tokens at its start that each shares with the one before it; 0 for the first."""
    is_packed: ClassVar[bool] = True

    @classmethod
    def of(cls, rows: Sequence[Tokens]) -> Self:
        """Sort rows into a tree."""
        keys = [row.astype(">u4").tobytes() for row in rows]  # compare as the numbers do
        order = sorted(range(len(rows)), key=keys.__getitem__)
        shared = (_common(rows[row], rows[after]) for row, after in itertools.pairwise(order))
        return cls(tuple(order), tuple(len(rows[row]) for row in order), (0, *shared))

    @property
    def distinct_tokens(self) -> int:
        """Tokens that one pack of all rows has."""
        return sum(self.lengths) - sum(self.shared)

    def tokens_read(self, rows: Sequence[int]) -> int:
        """Return how many tokens one pack of rows has that are neighbours."""
        first = self.order.index(rows[0]) if rows else 0
        places = range(first, first + len(rows))
        again = sum(self.shared[place] for place in places[1:])
        return sum(self.lengths[place] for place in places) - again

    def share_out(self, *, shares: int, budget_tokens: int, parts: int = 1) -> list[list[list[int]]]:
        """Return as many packs of row numbers for each of ``shares`` ranks; some may be empty.

        The rows are cut, in their order, so that the largest share is as small as possible. A token that two
        shares read counts in both.

        Args:
            budget_tokens: distinct tokens of a pack, at most; a longer row is alone.
            parts: packs that a share is to have, about; with more than one they are about as large.
        """
        everything = range(len(self.order))
        cut = self._fill(everything, self._least_budget(everything, shares))
        packed = [self._packs(share, budget_tokens, parts) for share in cut]
        numbers = [[[self.order[place] for place in pack] for pack in share] for share in packed]
        numbers += [[] for _ in range(shares - len(numbers))]
        return as_many_in_each(numbers)

    def _packs(self, share: range, budget_tokens: int, parts: int) -> list[range]:
        if parts > 1:
            budget_tokens = min(budget_tokens, self._least_budget(share, parts))
            return self._fill(share, budget_tokens)
        packs: list[range] = []
        while share:
            end = self._end(share, budget_tokens)
            if end < share.stop:
                # Of the later half, the place at which the next pack has the least to read again.
                half = (share.start + end + 1) // 2
                end = min(range(end, max(half, share.start + 1) - 1, -1), key=self.shared.__getitem__)
            packs.append(range(share.start, end))
            share = range(end, share.stop)
        return packs

    def _fill(self, rows: range, budget_tokens: int) -> list[range]:
        """Cut a run of the order into runs within the budget, each as long as it allows: the fewest."""
        filled: list[range] = []
        while rows:
            end = self._end(rows, budget_tokens)
            filled.append(range(rows.start, end))
            rows = range(end, rows.stop)
        return filled

    def _end(self, rows: range, budget_tokens: int) -> int:
        """Return where the longest pack from the start of ``rows`` ends, which has one row at least."""
        first, size = rows.start, self.lengths[rows.start]
        for place in rows[1:]:
            size += self.lengths[place] - self.shared[place]
            if size > budget_tokens:
                return place
        return max(first + 1, rows.stop)

    def _least_budget(self, rows: range, runs: int) -> int:
        """Return the smallest budget within which the rows fill at most ``runs`` runs."""
        most = sum(self.lengths[place] for place in rows)
        return bisect.bisect_left(range(most), True, key=lambda budget: len(self._fill(rows, budget)) <= runs)


def _common(one: Tokens, other: Tokens) -> int:
    """Return how many tokens at their start two rows share."""
    least = min(len(one), len(other))
    differing = np.flatnonzero(one[:least] != other[:least])
    return int(differing[0]) if len(differing) else least
