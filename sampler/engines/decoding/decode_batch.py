"""The running rows as one batch on the device, whose tensors change with the set of rows, not per token.

    step     1 --------- 2 --------- 3 ---------          on the device
    copy               1 ->        2 ->                   into pinned memory
    read                     1           2                the CPU, while the device computes 2 and 3

On a CUDA device the results of a step are read while the next one is computed: the CPU never waits for the
step it has just launched, and the device never waits for the CPU. On a CPU they are read at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sampler.engines.decoding.cached_model import CachedModel
from sampler.engines.decoding.kv_cache import KeyValueCache, uploaded
from sampler.engines.decoding.rows import Row
from sampler.engines.decoding.sampling import RowSampling, sampling_distribution


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A token for each of ``rows``, on its way to the CPU."""

    rows: Sequence[Row]
    version: int
    columns: Tensor
    """[3, rows], int32: token ids, and the bits of logprobs and kept masses."""
    copied: torch.cuda.Event | None

    def read(self, end_ids: frozenset[int]) -> None:
        """Wait for the copy and append to each row what was drawn for it."""
        if self.copied is not None:
            self.copied.synchronize()
        token_ids, logprobs, kept_masses = self.columns.unbind()
        floats = (column.view(torch.float32).tolist() for column in (logprobs, kept_masses))
        for row, *drawn in zip(self.rows, token_ids.tolist(), *floats, strict=True):
            row.append(*drawn, version=self.version, end_ids=end_ids)


class DecodeBatch:
    """Draws a token for each of its ``rows``, in their order."""

    def __init__(self, model: CachedModel, draw: Callable[[Tensor], Tensor], *, is_cpu: bool) -> None:
        """Start without rows.

        Args:
            draw: Returns a token of each row, [rows], from their log-probabilities, [rows, vocabulary].
            is_cpu: Read what was drawn at once, and keep rows in the order in which they came, so that what
                a seed draws depends on no more. Otherwise the last rows fill gaps, which copies fewer.
        """
        self._model = model
        self._draw = draw
        self._is_cpu = is_cpu
        self.rows: list[Row] = []
        self._cache = KeyValueCache([], columns=0, device=model.device)
        self._newest = torch.zeros(0, dtype=torch.long, device=model.device)
        """[rows]: the last token of each row, not in the cache yet."""
        self._sampling: RowSampling | None = None
        """One entry per row; None: to be uploaded again."""
        self._unread: deque[_Step] = deque()

    @property
    def held_bytes(self) -> int:
        """Memory of the cache."""
        return self._cache.held_bytes

    def draw(self, *, version: int) -> None:
        """Draw the next token of each row, and start to copy it to the CPU. At least one row."""
        logits = self._model.next_logits(self._newest, self._cache)
        if self._sampling is None:
            parameters = [row.running.request.sampling for row in self.rows]
            self._sampling = RowSampling.of(parameters, device=logits.device)
        logprob, kept_mass = sampling_distribution(logits, self._sampling)
        self._newest = self._draw(logprob)
        for row in self.rows:
            row.drawn += 1
        chosen = logprob.gather(-1, self._newest.unsqueeze(-1)).squeeze(-1).clamp(max=0.0)
        # As integers, so that nothing on the way takes a token for a denormal number.
        packed = torch.stack([self._newest.int(), chosen.view(torch.int32), kept_mass.view(torch.int32)])
        copied = None
        if packed.is_cuda:
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            packed = host.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._unread.append(_Step(self.rows, version, packed, copied))

    def read(self, end_ids: frozenset[int], *, newest_too: bool) -> list[Row]:
        """Append to the rows what was drawn for them in steps that are due; return these rows."""
        left = 0 if newest_too or self._is_cpu else 1
        steps = [self._unread.popleft() for _ in range(len(self._unread) - left)]
        for step in steps:
            step.read(end_ids)
        return [row for step in steps for row in step.rows]

    def join(self, rows: Sequence[Row], *, cache: KeyValueCache, at: Sequence[int]) -> None:
        """Add rows, at least one.

        Args:
            cache: Holds all but the last token of each; it is left empty.
            at: Which row of ``cache`` each one is.
        """
        self._cache.join(cache, at)
        self.rows = [*self.rows, *rows]
        newest = [row.newest for row in rows]
        self._newest = torch.cat([self._newest, uploaded(newest, device=self._newest.device)])
        self._sampling = None

    def drop_ended(self) -> None:
        """Drop the rows that draw no more."""
        kept = [number for number, row in enumerate(self.rows) if row.draws_more]
        if len(kept) == len(self.rows):
            return
        if not self._is_cpu:
            kept = _with_gaps_filled(kept)
        self._cache.keep(kept)
        self.rows = [self.rows[number] for number in kept]
        self._newest = self._newest.index_select(0, uploaded(kept, device=self._newest.device))
        self._sampling = None

    def take_all(self) -> list[Row]:
        """Return the rows and drop them. The memory of their cache is kept for their return."""
        rows, self.rows = self.rows, []
        self._cache.clear()
        self._newest = self._newest[:0]
        self._sampling = None
        return rows


def _with_gaps_filled(kept: list[int]) -> list[int]:
    """Return ``kept``, which ascends, with its last numbers moved to where one is missing."""
    present = set(kept)
    staying = [number for number in range(len(kept)) if number in present]
    moving = iter(kept[len(staying) :])
    return [number if number in present else next(moving) for number in range(len(kept))]
