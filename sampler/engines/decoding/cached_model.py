"""A transformers model that reads tokens into a cache and never waits for its device.

Given a mask of rows and columns, transformers looks on the CPU whether it masks anything, which waits for
every step before. So it gets whole masks where its layers take them: attention over everything before, by
torch's kernels, with rotary positions. Other models get the mask of rows and columns, and the wait with it.
"""

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
        """Wrap a model whose past is keys and values, of every token or of a window.

        Raises:
            StartupError: it keeps another state, which cannot be moved from row to row.
        """
        others = {type(layer) for layer in DynamicCache(config=model.config.get_text_config()).layers}
        if others - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise StartupError(
                f"the torch engine does not serve a model of the type {model.config.model_type}, "
                "which keeps more of the past than keys and values (convolution, recurrence)",
                fix="Set sampler.engine = 'vllm', or choose another model.",
            )
        self._model = model
        self._takes_whole_masks = _takes_whole_masks(model)

    @property
    def device(self) -> torch.device:
        """Where the tokens must be."""
        return self._model.device

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
            "past_key_values": cache.past,
            "use_cache": True,
        }


def _takes_whole_masks(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    attends_to_all = all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    is_rotary = getattr(config, "rope_parameters", None) is not None and not getattr(config, "alibi", False)
    return attends_to_all and is_rotary and config._attn_implementation == "sdpa"
