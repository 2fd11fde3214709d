"""The rows of a step, cut into micro-batches for ranks; ``PaddedRows``: of rows of similar length.

A ``PrefixTree`` is the other kind, whose micro-batches are packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


class StepRows(Protocol):
    """The rows of a step, to be cut into micro-batches."""

    is_packed: ClassVar[bool]
    """Whether a micro-batch of them is a pack."""

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all rows, without padding; where packs share them, shared ones once."""
        ...

    def tokens_read(self, rows: Sequence[int]) -> int:
        """Return how many positions the model reads of a micro-batch from ``share_out``."""
        ...

    def share_out(self, *, shares: int, budget_tokens: int, parts: int = 1) -> list[list[list[int]]]:
        """Return as many micro-batches of row numbers for each of ``shares`` ranks; some may be empty.

        Args:
            budget_tokens: of a micro-batch, at most; a longer row is alone.
            parts: micro-batches that a share is to have, about; with more than one they are about as large.
        """
        ...


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows whose micro-batches are padded to the longest row in them."""

    lengths: Sequence[int]
    """Tokens that the model reads for each row."""
    is_packed: ClassVar[bool] = False

    @property
    def distinct_tokens(self) -> int:
        return sum(self.lengths)

    def tokens_read(self, rows: Sequence[int]) -> int:
        """Return how many positions the model reads of some rows, padding included."""
        return len(rows) * max((self.lengths[row] for row in rows), default=0)

    def share_out(self, *, shares: int, budget_tokens: int, parts: int = 1) -> list[list[list[int]]]:
        """Return micro-batches of rows of similar length; see ``StepRows``.

        Rows are dealt by length, there and back, so that every share has about as many tokens: in whole
        micro-batches, all ranks wait for the slowest.
        """
        by_length = sorted(range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True)
        turn = [*range(shares), *reversed(range(shares))]
        dealt: list[list[int]] = [[] for _ in range(shares)]
        for place, row in enumerate(by_length):
            dealt[turn[place % len(turn)]].append(row)
        return as_many_in_each([self._cut(own, budget_tokens, parts) for own in dealt])

    def _cut(self, rows: Sequence[int], budget_tokens: int, parts: int) -> list[list[int]]:
        """Cut rows, longest first, into runs whose padded size is within the budget.

        A run's first row sets its width; a row longer than the budget is alone. For several parts, runs have
        as many rows as all may have: stages work on micro-batches of one shape.
        """
        most = len(rows)
        if rows and parts > 1:
            most = max(1, min(budget_tokens // self.lengths[rows[0]], most // parts))
        cut: list[list[int]] = []
        for row in rows:
            width = self.lengths[cut[-1][0]] if cut else 0
            if cut and len(cut[-1]) < most and width * (len(cut[-1]) + 1) <= budget_tokens:
                cut[-1].append(row)
            else:
                cut.append([row])
        return cut


def as_many_in_each(shares: Sequence[list[list[int]]]) -> list[list[list[int]]]:
    """Add empty micro-batches, so that every share has as many."""
    most = max(map(len, shares))
    return [share + [[] for _ in range(most - len(share))] for share in shares]
