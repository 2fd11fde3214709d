"""The engine of noise masks: each cell's action is drawn from the policy's Beta for the request's image.

The classifier of the same version is asked for the label of each masked image: minus its cross-entropy goes
with the completion as the reward, since no grader has the model. Greed, as evaluations ask for it, draws
nothing: the policy is dropped and the image is clean.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from node.errors import Reason, RefusedError
from node.kinds.noise_mask.network import NoiseMaskModel, log_density, read_prompts
from node.kinds.noise_mask.values import EDGE, MaskSizes
from node.values.groups.rollout import Completion, Finish
from sampler.engines.engine import PROBE_ID, EngineSettings, GenerationRequest
from sampler.engines.torch.live_model import LiveModel
from sampler.engines.torch.whole_request_engine import WholeRequestEngine, refuse_truncation

Floats = NDArray[np.float32]


class NoiseMaskEngine(WholeRequestEngine):
    """See ``sampler.engines.engine.Engine``; computes in float32, as the learner does."""

    _model: NoiseMaskModel

    def __init__(self, settings: EngineSettings) -> None:
        """Load policy and classifier as version 0.

        Raises:
            StartupError: as ``LiveModel.load``.
        """
        loaded = LiveModel.of(NoiseMaskModel, settings, compute_dtype=torch.float32)
        super().__init__(loaded)
        self.tokenizer = loaded.tokenizer
        self._sizes = MaskSizes.of(self._model.config.to_dict())
        self.probe = np.zeros(
            1 + self._sizes.pixels, np.int32
        )  # a black image, whose densities must be numbers

    def check(self, request: GenerationRequest) -> None:
        self._sizes.check_prompt(request.prompt_token_ids)
        if request.request_id == PROBE_ID:  # is sampled as every engine's is
            return
        sampling = request.sampling
        refuse_truncation(sampling, drawn="a mask is drawn from whole densities, or left out with top_k = 1")
        if sampling.temperature != 1 or sampling.max_new_tokens != self._sizes.cells:
            raise RefusedError(
                Reason.MALFORMED,
                f"temperature {sampling.temperature:g} and max_new_tokens {sampling.max_new_tokens}: a mask "
                f"has no temperature, and {self._sizes.cells} cells",
                fix=f"set coordinator.temperature = 1 and coordinator.max_new_tokens = {self._sizes.cells}",
            )

    def rows(self, request: GenerationRequest) -> int:
        return request.wanted

    def drawn(self, requests: Sequence[GenerationRequest]) -> Iterable[Iterable[Completion]]:
        device, wanted = self._model.device, [request.wanted for request in requests]
        prompts = torch.from_numpy(np.stack([request.prompt_token_ids for request in requests])).to(device)
        images, labels = read_prompts(prompts, self._model.config)
        of_row = torch.arange(len(requests)).repeat_interleave(torch.tensor(wanted))
        is_drawn = torch.tensor([not request.sampling.top_k for request in requests])[of_row]
        parameters = self._model.policy(images)[of_row[is_drawn].to(device)]
        a, b = np.exp(parameters.double().cpu().numpy()).swapaxes(0, 1)
        drawn = self._random.beta(a, b).clip(EDGE, 1 - EDGE).astype(np.float32)
        masks = torch.ones(len(of_row), self._sizes.cells)
        logprobs = torch.zeros_like(masks)
        masks[is_drawn] = torch.from_numpy(drawn)
        logprobs[is_drawn] = log_density(masks[is_drawn].to(device), parameters).cpu()
        of_row = of_row.to(device)
        logits = self._model(images[of_row], masks.to(device))
        costs = functional.cross_entropy(logits, labels[of_row], reduction="none").cpu()
        completions = map(self._completion, masks.numpy(), logprobs.numpy(), costs.tolist())
        return (itertools.islice(completions, count) for count in wanted)

    def _completion(self, mask: Floats, logprob: Floats, cost: float) -> Completion:
        cells = len(mask)
        return Completion(
            token_ids=np.arange(cells, dtype=np.int32),
            behaviour_logprob=logprob,
            policy_version=np.full(cells, self._version, np.int32),
            finish=Finish.END,
            reward=-cost,
            actions=mask,
        )
