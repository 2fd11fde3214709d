"""What the sampler adds to the workers of a server; ``vllm serve --worker-extension-cls`` names it.

The sampler calls it by the server's ``/collective_rpc``, which takes texts and returns JSON; frames travel in
memory that both map. Each sampler that connects names its session, and calls of another one are refused: a
server that was started again has none, and its model is the base model.

Who reaches the server's development endpoints may call every method of its workers. These add nothing to
that but the words of the model: they open one kind of file, in one directory, of one owner.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

from vllm.utils.torch_utils import set_random_seed

from node.errors import StartupError
from node.tokenizer import tokenizer_digest
from sampler.engines.remote.frame_memory import Rooms, open_frame_memory
from sampler.engines.vllm.vllm_worker import SamplerWorker

_REQUEST: Final = re.compile(r"([0-9a-f]{32})\.(\d+)")
"""A sampler's session and the number of a request, somewhere in vLLM's names of its completions."""


class ServerWorker(SamplerWorker):
    """One device's part of the model, and what the sampler asks of it."""

    rank: int
    sampler_session: str = ""
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

        A sampler that does not share the server's directory is refused here, before it has changed anything.
        """
        try:
            self.sampler_offered = open_frame_memory(
                memory, workers=self.vllm_config.parallel_config.tensor_parallel_size
            )
        except (OSError, ValueError) as error:
            return f"{memory!r} cannot be used in the server's weights directory: {error}"
        return None

    def begin_session(self, session: str, seed: str) -> dict[str, Any] | str:
        """Hold the words of the base model for a sampler, whatever they were before.

        Args:
            seed: Of the sampling.
        Returns:
            The layout's digest, the tokenizer's, and how many elements of each tensor are on this device; or
            why that is impossible.
        """
        self.sampler_session = ""
        model_dir = self.vllm_config.model_config.model
        if not Path(model_dir).is_dir():
            return f"the server serves {model_dir!r}, which is no directory there"
        try:
            digest = tokenizer_digest(Path(model_dir))
            elements = self.hold_words(model_dir)
        except (OSError, ValueError, StartupError) as error:
            return f"the server cannot use the model in {model_dir}: {error}"
        if isinstance(elements, str):
            return elements
        set_random_seed(int(seed))
        self.sampler_rooms = self.sampler_offered
        self.sampler_session = session
        return {
            "layout": self.sampler_declared.layout.digest.hex(),
            "tokenizer": digest.hex(),
            "elements": elements,
        }

    def move_frames(self, session: str, moves: str) -> str | None:
        """Copy frames between the model and the shared memory.

        Args:
            moves: ``read FRAME SLOT`` or ``write FRAME SLOT``, separated by commas.
        Returns:
            Why that is impossible, or None.
        """
        if session != self.sampler_session:
            return self._another()
        for move in moves.split(","):
            call, frame, slot = move.split(" ")
            span, rooms = self.sampler_declared.layout.frames[int(frame)], self.sampler_rooms[int(slot)]
            if call == "write":
                self.sampler_words.live.write(span, rooms[0, : span.words])
            else:
                rooms[self.rank, : span.words] = self.sampler_words.live.read(span)
        return None

    def settle_frames(self, session: str) -> str | None:
        """Compute with what was written."""
        if session != self.sampler_session:
            return self._another()
        self.settle_words()
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
