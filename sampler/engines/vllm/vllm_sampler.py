"""vLLM's sampler, with the mass that truncation kept at every token.

vLLM tells the logprob of a drawn token and the token's rank in the vocabulary. Nobody here needs the rank,
and its place in vLLM's outputs follows the token through batches, preemption and the scheduler: the kept mass
travels there, as the bits of a float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler


class KeptMassSampler(Sampler):
    """Draws as vLLM does. Every request samples at a temperature and asks for the logprob of its token."""

    def __init__(self) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._kept_mass: Tensor

    def sample(
        self, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self.apply_temperature(logits, sampling_metadata.temperature, sampling_metadata.all_random)
        top_k, top_p = sampling_metadata.top_k, sampling_metadata.top_p
        processors = sampling_metadata.logitsprocs.argmax_invariant
        has_min_p = any(getattr(processor, "min_p_count", 1) for processor in processors)
        self._kept_mass = logits.new_ones(len(logits))
        if has_min_p or top_k is not None or top_p is not None:
            whole = logits.logsumexp(dim=-1)
            for processor in processors:
                logits = processor.apply(logits)
            logits = apply_top_k_top_p(logits, top_k, top_p)
            self._kept_mass = (logits.logsumexp(dim=-1) - whole).exp().clamp(max=1.0)
        sampled, logprobs = self.topk_topp_sampler(logits, sampling_metadata.generators, None, None)
        return sampled, logprobs

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        ids = token_ids.unsqueeze(-1)
        return LogprobsTensors(
            ids.to(torch.int32), logprobs.gather(-1, ids), self._kept_mass.view(torch.int32)
        )


def kept_masses(ranks: Sequence[int]) -> NDArray[np.float32]:
    """Return the kept masses that came as the ranks of a completion's tokens."""
    return np.array(ranks, np.int32).view(np.float32)
