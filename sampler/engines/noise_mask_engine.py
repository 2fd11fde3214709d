"""The engine of noise masks: each cell's action is drawn from the policy's Beta for the request's image.

The classifier of the same version is asked for the label of each masked image: minus its cross-entropy goes
with the completion as the reward, since no grader has the model. Greed, as evaluations ask for it, draws
nothing: the policy is dropped and the image is clean.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch.nn import functional

from node.errors import Reason, RefusedError
from node.mask_network import NoiseMaskModel, log_density, read_prompts
from node.noise_masks import EDGE, MaskSizes
from node.rollout import Completion, Finish
from sampler.engines.engine import PROBE_ID, EngineSettings, GenerationRequest
from sampler.engines.live_model import LiveModel
from sampler.engines.whole_request_engine import WholeRequestEngine


class NoiseMaskEngine(WholeRequestEngine):
    """See ``sampler.engines.engine.Engine``; computes in float32, as the learner does."""

    _model: NoiseMaskModel

    def __init__(self, settings: EngineSettings) -> None:
        """Load policy and classifier as version 0.

        Raises:
            StartupError: as ``LiveModel.load``.
        """
        loaded = LiveModel.load(
            NoiseMaskModel,
            settings.model_dir,
            device=settings.device,
            compute_dtype=torch.float32,
            threads=settings.threads,
            seed=settings.seed,
        )
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
        if sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 1 or sampling.stop:
            raise RefusedError(
                Reason.MALFORMED,
                f"{sampling.truncation} stop={list(sampling.stop)}: a mask is drawn from whole densities, or "
                "left out with top_k = 1",
                fix="leave top_p, min_p, top_k and stop out of the coordinator's configuration",
            )
        if sampling.temperature != 1 or sampling.max_new_tokens != self._sizes.cells:
            raise RefusedError(
                Reason.MALFORMED,
                f"temperature {sampling.temperature:g} and max_new_tokens {sampling.max_new_tokens}: a mask "
                f"has no temperature, and {self._sizes.cells} cells",
                fix=f"set coordinator.temperature = 1 and coordinator.max_new_tokens = {self._sizes.cells}",
            )

    def drawn(self, request: GenerationRequest) -> Iterable[Completion]:
        prompts = torch.from_numpy(request.prompt_token_ids[None]).to(self._model.device)
        image, label = read_prompts(prompts, self._model.config)
        [parameters] = self._model.policy(image)
        size = (request.wanted, self._sizes.cells)
        masks, logprobs = torch.ones(size), torch.zeros(size)
        if not request.sampling.top_k:
            a, b = np.exp(parameters.double().cpu().numpy())
            drawn = self._random.beta(a, b, size).clip(EDGE, 1 - EDGE)
            masks = torch.from_numpy(drawn.astype(np.float32))
            logprobs = log_density(masks.to(parameters.device), parameters).cpu()
        logits = self._model(image.expand(request.wanted, -1, -1, -1), masks.to(image.device))
        costs = functional.cross_entropy(logits, label.expand(request.wanted), reduction="none")
        cells = np.arange(self._sizes.cells, dtype=np.int32)
        for mask, logprob, cost in zip(masks.numpy(), logprobs.numpy(), costs.tolist(), strict=True):
            yield Completion(
                token_ids=cells,
                behaviour_logprob=logprob,
                policy_version=np.full(len(cells), self._version, np.int32),
                finish=Finish.END,
                reward=-cost,
                actions=mask,
            )
