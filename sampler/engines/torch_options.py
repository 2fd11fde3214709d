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

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What becomes of the keys and values of running completions when a version is swapped in. ``recompute``
    costs one pass over their tokens and makes every logprob that of the version it names. ``keep`` costs
    nothing; logprobs are still those the tokens were drawn from, but of a mixture of versions."""

    draw: Literal["noise", "inverse"] = "noise"
    """How a token is drawn from its distribution. ``noise`` takes a random number for every word of the
    vocabulary, as torch.multinomial does: on a CPU up to half of a step of a small model. ``inverse`` takes
    one for every token and inverts the cumulative distribution. A seed gives other tokens with it."""

    prefill_chunk_tokens: int = Field(default=2048, ge=1, le=1 << 24)
    """Most tokens, padding included, that are read between two decode steps: of prompts, and of running
    completions after a new version. Fewer hold up the other completions for less long; more use the device
    better."""
