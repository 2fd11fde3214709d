"""The running rows as one batch on the device, whose tensors change with the set of rows, not per token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.kv_cache import KeyValueCache
from sampler.engines.decoding.readback import Drawn
from sampler.engines.decoding.rows import Row
from sampler.engines.decoding.sampling_distribution import RowSampling, sampling_distribution
from sampler.engines.decoding.upload import uploaded


class DecodeBatch:
    """Draws a token for each of its rows.

    Attributes:
        rows: in the order of the batch.
    """

    def __init__(self, model: CachedModel, draw: Callable[[Tensor], Tensor], *, keeps_order: bool) -> None:
        """Start without rows.

        Args:
            draw: Returns a token of each row, [rows], from their log-probabilities, [rows, vocabulary].
            keeps_order: Rows stay in the order in which they came, so that what a seed draws depends on no
                more. Otherwise the last rows fill the gaps, which copies fewer of them.
        """
        self._model = model
        self._draw = draw
        self._keeps_order = keeps_order
        self.rows: list[Row] = []
        self._cache = KeyValueCache([], columns=0, device=model.device)
        self._newest = torch.zeros(0, dtype=torch.long, device=model.device)
        """[rows]: the last token of each row, not in the cache yet."""
        self._sampling: RowSampling | None = None
        """Of each row; None: to be uploaded again."""

    @property
    def held_bytes(self) -> int:
        """Memory of the cache."""
        return self._cache.held_bytes

    def draw(self) -> Drawn:
        """Draw the next token of each row. At least one row."""
        logits = self._model.next_logits(self._newest, self._cache)
        if self._sampling is None:
            parameters = [row.running.request.sampling for row in self.rows]
            self._sampling = RowSampling.of(parameters, device=logits.device)
        logprob, kept_mass = sampling_distribution(logits, self._sampling)
        self._newest = self._draw(logprob)
        for row in self.rows:
            row.drawn += 1
        chosen = logprob.gather(-1, self._newest.unsqueeze(-1)).squeeze(-1).clamp(max=0.0)
        return Drawn(self._newest, chosen, kept_mass)

    def join(self, rows: Sequence[Row], *, cache: KeyValueCache, at: Sequence[int]) -> None:
        """Add rows, at least one.

        Args:
            cache: Holds all but the last token of each; it is left empty.
            at: Which row of ``cache`` each one is.
        """
        self._cache.join(cache, at)
        self.rows = [*self.rows, *rows]
        newest = [row.newest for row in rows]
        self._newest = torch.cat([self._newest, self._uploaded(newest)])
        self._sampling = None

    def drop_ended(self) -> None:
        """Drop the rows that draw no more."""
        kept = [number for number, row in enumerate(self.rows) if row.draws_more]
        if len(kept) == len(self.rows):
            return
        if not self._keeps_order:
            kept = _with_gaps_filled(kept)
        self._cache.keep(kept)
        self.rows = [self.rows[number] for number in kept]
        self._newest = self._newest.index_select(0, self._uploaded(kept))
        self._sampling = None

    def take_all(self) -> list[Row]:
        """Return the rows and drop them. The memory of their cache is kept for their return."""
        rows, self.rows = self.rows, []
        self._cache.clear()
        self._newest = self._newest[:0]
        self._sampling = None
        return rows

    def _uploaded(self, numbers: Sequence[int]) -> Tensor:
        return uploaded(numbers, dtype=torch.long, device=self._newest.device)


def _with_gaps_filled(kept: list[int]) -> list[int]:
    """Return ``kept``, which ascends, with its last numbers moved to where one is missing."""
    present = set(kept)
    staying = [number for number in range(len(kept)) if number in present]
    moving = iter(kept[len(staying) :])
    return [number if number in present else next(moving) for number in range(len(kept))]
