"""A plain FSDP2 loop of torch, as its tutorials have it: what bench/learner_ranks.py compares ours with.

The model's own forward under ``fully_shard``, whole logits, a mean for a loss, clipping and AdamW; each rank
has its share of the rows.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from bench.learner_steps import CLIP_NORM, gathered_logprob, make_optimizer


class PlainSharded:
    """The least that a sharded step does."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, *, prompt_tokens: int) -> None:
        """Take all rows, [rows, prompt and completion]."""
        self._ids = ids[dist.get_rank() :: dist.get_world_size()]
        self._prompt_tokens = prompt_tokens
        self.model = model.train(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._optimizer = make_optimizer(model)

    def __call__(self) -> float:
        """Take the step; return its loss."""
        logprob = gathered_logprob(self.model, self._ids)
        loss = -logprob[:, self._prompt_tokens - 1 :].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
