"""Options of the torch engine."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchOptions(BaseModel):
    """Table ``[sampler.engine_options]`` where ``sampler.engine`` is ``torch``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    memory_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory for the key-value caches of running completions. A prompt whose completions would not fit, were
    all of them as long as they may become, waits for others to finish. Unset: on a CUDA device 80 % of what
    is free once the model is loaded and room for a second copy of it is set aside; on a CPU no bound."""

    draw: Literal["noise", "inverse"] = "noise"
    """How a token is drawn from its distribution. ``noise`` takes a random number for every word of the
    vocabulary, as torch.multinomial does: on a CPU up to half of a step of a small model. ``inverse`` takes
    one for every token and inverts the cumulative distribution. A seed gives other tokens with it."""

    prefill_chunk_tokens: int = Field(default=2048, ge=1, le=1 << 24)
    """Most tokens of prompts, padding included, that are read between two decode steps. Fewer hold running
    completions up for less long; more use the device better. Taking a new version reads all running
    completions again in chunks of this size."""
