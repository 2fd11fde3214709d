"""What the sampler adds to vLLM's workers: one in this process, or one in a process of its own per device.

vLLM imports this module in each worker, before it loads the model, and makes ``SamplerWorker`` a base of its
worker class (``worker_extension_cls``). Importing it keeps vLLM from throwing away the words that it packs.
"""

from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config

from node.errors import StartupError
from node.weights.format.digests import Words
from sampler.engines.vllm.declared_tensors import DeclaredTensors
from sampler.engines.vllm.shared_names import note_queues, remove_meeting, remove_queue_names
from sampler.engines.vllm.vllm_sampler import KeptMassSampler
from sampler.engines.vllm.vllm_words import LiveParameters, keep_packed_words, live_parameters
from sampler.process_tree import adopt_orphans

keep_packed_words()
note_queues()


class SamplerWorker:
    """The live words on one device, and how they are reached by vLLM's ``collective_rpc``."""

    distributed_init_method: str
    model_runner: Any
    vllm_config: Any
    sampler_words: LiveParameters
    sampler_declared: DeclaredTensors

    def hold_words(self, model_dir: str) -> dict[str, int] | str:
        """Find the model's words among the parameters, and draw with the sampler's own sampler.

        They are the base model's, if need be again.

        Returns:
            How many elements of each tensor are on this device; or why vLLM cannot serve the model.
        """
        self.model_runner.sampler = KeptMassSampler()
        try:
            # vLLM wraps the classes of transformers that it computes with, and the wrapper asks for this.
            with set_current_vllm_config(self.vllm_config):
                self.sampler_declared = DeclaredTensors.of(Path(model_dir))
            self.sampler_words = live_parameters(
                self.model_runner.get_model(),
                self.sampler_declared,
                model_dir=Path(model_dir),
                are_changed=hasattr(self, "sampler_words"),
            )
        except StartupError as error:
            return error.what
        return dict(self.sampler_words.elements)

    def end_with_the_sampler(self) -> None:
        """Leave nothing behind, however sampler and workers end, hung ones too. All workers are loaded."""
        if self.vllm_config.parallel_config.world_size > 1:  # this is not the sampler's process
            adopt_orphans()
        remove_queue_names()
        remove_meeting(self.distributed_init_method)

    def read_words(self, frame: int) -> Words:
        """Return the words of a frame; zero where they are on other devices only."""
        return self.sampler_words.live.read(self.sampler_declared.layout.frames[frame])

    def write_words(self, frame: int, words: Words) -> None:
        """Replace the words of a frame that are on this device."""
        self.sampler_words.live.write(self.sampler_declared.layout.frames[frame], words)

    def settle_words(self) -> None:
        """Compute with what was written."""
        self.sampler_words.settle()
