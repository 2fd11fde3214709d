"""A transformers model that reads tokens into a cache and never waits for its device.

Given a mask of rows and columns, transformers looks on the CPU whether it masks anything, which waits for
every step before. So it gets whole masks where its layers take them: attention over everything before, by
torch's kernels, with rotary positions. Other models get the mask of rows and columns, and the wait with it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from node.errors import StartupError
from sampler.engines.decoding.kv_cache import KeyValueCache


class CachedModel:
    """Reads tokens into caches."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model; StartupError if it keeps more of the past than keys and values."""
        config = model.config.get_text_config()
        layers = {type(layer) for layer in DynamicCache(config=config).layers}
        if layers - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise StartupError(
                f"the torch engine does not serve a model of the type {model.config.model_type}, "
                "which keeps more of the past than keys and values (convolution, recurrence)",
                fix="Set sampler.engine = 'vllm', or choose another model.",
            )
        self._model = model
        self._cache_argument = cache_argument(model)
        self.device: torch.device = model.device
        is_rotary = getattr(config, "rope_parameters", None) is not None and not getattr(
            config, "alibi", False
        )
        self._takes_whole_masks = (
            layers <= {DynamicLayer} and is_rotary and config._attn_implementation == "sdpa"
        )

    def read(self, token_ids: Tensor, cache: KeyValueCache) -> None:
        """Append the next tokens of each row, [rows, columns]."""
        self._model.base_model(**self._inputs(token_ids, cache))
        cache.take_appended(token_ids.shape[1])

    def next_logits(self, token_ids: Tensor, cache: KeyValueCache) -> Tensor:
        """Append the next token of each row, [rows]; return the logits of the one after, [rows, words]."""
        logits: Tensor = self._model(**self._inputs(token_ids.unsqueeze(-1), cache)).logits[:, -1]
        cache.take_appended(1)
        return logits

    def cache_bytes(self) -> int:
        """Return the bytes of cache that a token takes, found by reading one."""
        cache = KeyValueCache([0], columns=1, device=self.device)
        self.read(torch.zeros((1, 1), dtype=torch.long, device=self.device), cache)
        return cache.held_bytes

    def _inputs(self, token_ids: Tensor, cache: KeyValueCache) -> dict[str, Any]:
        columns = token_ids.shape[1]
        cache.make_room(columns)
        return {
            "input_ids": token_ids,
            "position_ids": cache.positions(columns),
            "attention_mask": (
                cache.mask(columns) if self._takes_whole_masks else cache.padding_mask(columns)
            ),
            self._cache_argument: cache.past,
            "use_cache": True,
        }


def cache_argument(model: PreTrainedModel) -> str:
    """Return by which name a model takes a cache: ``cache`` since transformers 5.24."""
    parameters = inspect.signature(model.base_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
