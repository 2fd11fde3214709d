"""The sampler's addition to vLLM's workers, whether vLLM runs in its process, in others, or is a server.

vLLM imports this module in each worker, before it loads the model, and makes ``SamplerWorker`` a base of its
worker class (``worker_extension_cls``). Importing it keeps vLLM from throwing away the words that it packs.

It is called by ``collective_rpc``; a server's takes texts and returns JSON, so that frames travel in memory
that sampler and workers map. Each sampler that connects names its session, and calls of another one are
refused: a server that was started again has none, and its model is the base model. Whoever reaches a server's
development endpoints may call every method of its workers. These add nothing to that but the words of the
model: they open one kind of file, in one directory, of one owner.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from node.errors import StartupError
from node.text.text_rules import TextRules
from sampler.engines.vllm.live_parameters import LiveParameters, keep_packed_words, live_parameters
from sampler.engines.vllm.model_directory import DeclaredTensors
from sampler.engines.vllm.shared_names import note_queues, remove_meeting, remove_queue_names
from sampler.engines.words.frame_memory import Rooms, open_frame_memory
from sampler.engines.words.shared_words import move_frames
from sampler.process_tree import adopt_orphans

_REQUEST: Final = re.compile(r"([0-9a-f]{32})\.(\d+)")
"""A sampler's session and the number of a request, somewhere in vLLM's names of its completions."""

keep_packed_words()
note_queues()


class SamplerWorker:
    """One device's part of the model, and what the sampler asks of it."""

    rank: int
    distributed_init_method: str
    model_runner: Any
    vllm_config: Any
    sampler_session: str = ""
    sampler_words: LiveParameters
    sampler_declared: DeclaredTensors
    sampler_offered: Rooms
    sampler_rooms: Rooms

    def describe_server(self) -> dict[str, Any]:
        """Return the settings that a sampler depends on."""
        config = self.vllm_config
        return {
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "context_tokens": config.model_config.max_model_len,
            "batch": config.scheduler_config.max_num_seqs,
            "workers": config.parallel_config.tensor_parallel_size,
            "pipeline_parallel": config.parallel_config.pipeline_parallel_size,
            "data_parallel": config.parallel_config.data_parallel_size,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "v2_model_runner": bool(config.use_v2_model_runner),
            "speculative_decoding": config.speculative_config is not None,
        }

    def offer_memory(self, memory: str) -> str | None:
        """Map the file of this name, for the next session; return why that is impossible, or None.

        A sampler that does not share the directory is refused here, before it has changed anything.
        """
        try:
            self.sampler_offered = open_frame_memory(
                memory, workers=self.vllm_config.parallel_config.tensor_parallel_size
            )
        except (OSError, ValueError) as error:
            return f"{memory!r} cannot be used in the server's weights directory: {error}"
        return None

    def begin_session(self, session: str, seed: str) -> dict[str, Any] | str:
        """Hold the base model's words for a sampler, whatever they were before, and draw as it does.

        Return digests and how many elements of each tensor are on this device, or why that is impossible.
        """
        self.sampler_session = ""
        model_dir = Path(self.vllm_config.model_config.model)
        if not model_dir.is_dir():
            return f"the server serves '{model_dir}', which is not a directory there"
        self.model_runner.sampler = KeptMassSampler()
        try:
            # vLLM wraps the classes of transformers that it computes with, and the wrapper asks for this.
            with set_current_vllm_config(self.vllm_config):
                self.sampler_declared = DeclaredTensors.of(model_dir)
            self.sampler_words = live_parameters(
                self.model_runner.get_model(),
                self.sampler_declared,
                model_dir=model_dir,
                are_changed=hasattr(self, "sampler_words"),
            )
            rules = TextRules.of(model_dir)
        except StartupError as error:
            return error.what
        except (OSError, ValueError) as error:
            return f"the server cannot use the model in {model_dir}: {error}"
        set_random_seed(int(seed))
        if hasattr(self, "sampler_offered"):
            self.sampler_rooms = self.sampler_offered
        self.sampler_session = session
        return {
            "layout": self.sampler_declared.layout.digest.hex(),
            "text": rules.digest.hex(),
            "text_summary": rules.summary,
            "elements": dict(self.sampler_words.elements),
        }

    def end_with_the_sampler(self) -> None:
        """Leave nothing behind, however sampler and workers end, hung ones too. All workers are loaded."""
        if self.vllm_config.parallel_config.world_size > 1:  # this is not the sampler's process
            adopt_orphans()
        remove_queue_names()
        remove_meeting(self.distributed_init_method)

    def move_frames(self, session: str, moves: str) -> str | None:
        """Copy frames between the model and the shared memory; return why that is impossible, or None."""
        if session != self.sampler_session:
            return self._another()
        layout = self.sampler_declared.layout
        move_frames(moves, self.sampler_words.live, layout, self.sampler_rooms, worker=self.rank)
        return None

    def settle_frames(self, session: str) -> str | None:
        """Compute with what was written."""
        if session != self.sampler_session:
            return self._another()
        self.sampler_words.settle()
        return None

    def count_tokens(self, session: str) -> dict[str, int] | str:
        """Return how many tokens were drawn for each running request of the session, by its number."""
        if session != self.sampler_session:
            return self._another()
        tokens: Counter[str] = Counter()
        for name, request in self.model_runner.requests.items():
            found = _REQUEST.search(name)
            if found is not None and found[1] == session:
                tokens[found[2]] += len(request.output_token_ids)
        return dict(tokens)

    def _another(self) -> str:
        if not self.sampler_session:
            return "the server was started again, or another sampler failed to connect to it"
        return "another sampler has connected to the server"


class KeptMassSampler(Sampler):
    """Draws as vLLM does, and passes on the mass that truncation kept at every token.

    vLLM returns the logprob of a drawn token and the token's rank in the vocabulary. Nobody here needs the
    rank, and its place in vLLM's outputs follows the token through batches, preemption and the scheduler: the
    kept mass travels there, as the bits of a float32. Every request samples at a temperature, has no seed of
    its own, and asks for the logprob of its token.

    One softmax serves the draw, the logprob and the mass: on a GPU [rows, vocabulary] is read 5 times and
    written 4 times (6 and 5 where logprobs are of a log-softmax), 8 and 5 times with truncation besides its
    own work (14 and 9 where the mass is of two logsumexps).
    """

    def __init__(self) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self.topk_topp_sampler.logprobs_mode = "raw_logprobs"  # it makes none of the whole vocabulary
        self._kept_mass: Tensor

    def sample(
        self, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a token of each row, [rows], and its logprob, [rows, 1]."""
        logits = self.apply_temperature(logits, sampling_metadata.temperature, sampling_metadata.all_random)
        top_k, top_p = sampling_metadata.top_k, sampling_metadata.top_p
        processors = sampling_metadata.logitsprocs.argmax_invariant
        has_min_p = any(getattr(processor, "min_p_count", 1) for processor in processors)
        probabilities = logits.softmax(dim=-1)
        self._kept_mass = probabilities.new_ones(len(logits))
        if has_min_p or top_k is not None or top_p is not None:
            for processor in processors:
                logits = processor.apply(logits)
            logits = apply_top_k_top_p(logits, top_k, top_p)
            probabilities.masked_fill_(logits == -torch.inf, 0.0)
            self._kept_mass = probabilities.sum(dim=-1)
        sampled = self._drawn(logits, probabilities)
        drawn = probabilities.gather(-1, sampled.unsqueeze(-1))
        return sampled, drawn.log() - self._kept_mass.log().unsqueeze(-1)

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        kept_mass = self._kept_mass.clamp(max=1.0).view(torch.int32)
        return LogprobsTensors(token_ids.unsqueeze(-1).to(torch.int32), logprobs, kept_mass)

    def _drawn(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        if logits.is_cpu:
            sampled: Tensor = self.topk_topp_sampler(logits, {}, None, None)[0]
            return sampled.long()
        return by_exponential_race(probabilities)


def by_exponential_race(probabilities: Tensor) -> Tensor:
    """Draw a token of each row, [rows], as vLLM does on a GPU; ``probabilities``: [rows, vocabulary]."""
    noise = torch.empty_like(probabilities).exponential_()
    return torch.div(probabilities, noise, out=noise).argmax(dim=-1)
