"""The key-value cache of running rows of different lengths, as one left-padded batch.

Keys are stored with their rotary position applied, and positions count from a row's own first token. So rows
can be dropped, repeated and padded without changing their contents. A cache is at least one column wide, so
that empty rows need no special case.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class KeyValueCache:
    """The past of a batch of rows.

    Attributes:
        past: What the model reads and appends to; keys and values are [rows, heads, length, head size].
        mask: [rows, length], bool; False where a row is padded, always on its left.
    """

    def __init__(self, past: DynamicCache, mask: Tensor) -> None:
        self.past = past
        self.mask = mask

    def lengths(self) -> Tensor:
        """Return [rows]: how many tokens each row holds, which is also the position of its next token."""
        return self.mask.sum(dim=-1)

    def mask_with_next(self) -> Tensor:
        """Return [rows, length + 1]: the mask once every row has one more token."""
        return pad(self.mask, (0, 1), value=True)

    def take_appended(self) -> None:
        """Note that the model has appended one token to every row of ``past``."""
        self.mask = self.mask_with_next()

    def rows(self, numbers: Sequence[int]) -> "KeyValueCache":
        """Return the rows ``numbers``, in that order, repeats allowed, without padding common to all."""
        index = torch.tensor(numbers, dtype=torch.long, device=self.mask.device)
        mask = self.mask.index_select(0, index)
        start = mask.shape[1] - max(1, int(mask.sum(dim=-1).max()))
        return _cache(
            (
                (k.index_select(0, index)[:, :, start:], v.index_select(0, index)[:, :, start:])
                for k, v in self._layers()
            ),
            mask[:, start:],
        )

    def joined(self, other: "KeyValueCache") -> "KeyValueCache":
        """Return the rows of both, this one's first."""
        length = max(self.mask.shape[1], other.mask.shape[1])
        masks = [pad(cache.mask, (length - cache.mask.shape[1], 0)) for cache in (self, other)]
        return _cache(
            (
                (_stacked(keys, other_keys, length=length), _stacked(values, other_values, length=length))
                for (keys, values), (other_keys, other_values) in zip(
                    self._layers(), other._layers(), strict=True
                )
            ),
            torch.cat(masks),
        )

    def _layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        for layer in self.past.layers:
            if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
                raise TypeError(f"expected layers of keys and values, not {type(layer).__name__}")
            yield layer.keys, layer.values


def _cache(layers: Iterable[tuple[Tensor, Tensor]], mask: Tensor) -> KeyValueCache:
    return KeyValueCache(DynamicCache(ddp_cache_data=layers), mask)


def _stacked(*tensors: Tensor, length: int) -> Tensor:
    return torch.cat([pad(tensor, (0, 0, length - tensor.shape[2], 0)) for tensor in tensors])
