"""``[sampler.engine_options]``: settings that only one engine has, checked before the engine is imported."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sampler.api_key import api_key_in

_OURS: Final[Mapping[str, str]] = {
    "model": "sampler.model_dir is loaded",
    "tokenizer": "sampler.model_dir's is used",
    "dtype": "set sampler.compute_dtype",
    "device_ids": "set sampler.device",
    "seed": "set sampler.seed",
    "max_model_len": "set context_tokens",
    "max_num_seqs": "set batch",
    "gpu_memory_utilization": "set memory_share",
    "kv_cache_memory_bytes": "set kv_cache_bytes",
    "tensor_parallel_size": "set tensor_parallel",
    "pipeline_parallel_size": "devices share each layer: set tensor_parallel",
    "enable_expert_parallel": "devices share each expert: set tensor_parallel",
    "data_parallel_size": "start a sampler for each replica of the model",
    "distributed_executor_backend": "it follows from tensor_parallel",
    "worker_extension_cls": "it writes new versions",
    "quantization": "it would compute with other words than the learner signed",
    "load_format": "the model's safetensors files are verified after loading",
    "enable_lora": "it would compute with other words than the learner signed",
    "logprobs_mode": "recorded logprobs are those tokens were drawn from",
    "speculative_config": "no version is known of the tokens it drafts",
    "async_scheduling": "set async_scheduling",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}
"""Arguments of vLLM's that are set here or must not be set, and why."""


def _check_extra_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in arguments.keys() & _OURS.keys():
        raise ValueError(f"must not have {name!r}: {_OURS[name]}")
    return arguments


class _Options(BaseModel):
    """Options that every built-in engine has."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """The fate of the keys and values of running completions when a version is swapped in. ``recompute``
    costs one pass over their tokens and makes every logprob that of the version it names. ``keep`` costs
    nothing; logprobs are still those the tokens were drawn from, but of a mixture of versions."""


class TorchOptions(_Options):
    """Table ``[sampler.engine_options]`` where ``sampler.engine`` is ``torch``."""

    memory_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory for the key-value caches of running completions. A prompt whose completions would not fit, were
    all of them as long as they may become, waits for others to finish. Unset: on a CUDA device 80 % of what
    is free once the model is loaded and room for a second copy of it is set aside; on a CPU no bound."""

    draw: Literal["noise", "inverse"] = "noise"
    """How a token is drawn from its distribution. ``noise`` takes a random number for every word of the
    vocabulary, as torch.multinomial does: on a CPU up to half of a step of a small model. ``inverse`` takes
    one for every token and inverts the cumulative distribution. A seed gives other tokens with it."""

    prefill_chunk_tokens: int = Field(default=2048, ge=1, le=1 << 24)
    """Most tokens, padding included, that are read between two decode steps: of prompts, and of running
    completions after a new version. Fewer hold up the other completions for less long; more use the device
    better."""


class VllmOptions(_Options):
    """Table ``[sampler.engine_options]`` where the engine is ``vllm``."""

    context_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt and a completion together. Fewer leave memory for more completions at once.
    Unset: as many as the model allows and the memory for keys and values holds."""

    batch: int | None = Field(default=None, ge=1, le=65536)
    """Most completions generated at once; the rest waits. Unset: what vLLM takes, 1024 on a GPU of 70 GB and
    more, else 256. Where sampler.concurrency_groups is unset, so many are asked for at once, or what the
    memory holds if that is less; on a CPU 64 at most, which keep it busy."""

    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory for weights, keys and values. Lower it where something else uses the GPU."""

    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory for keys and values. Unset: what ``memory_share`` leaves of a GPU, 1 GiB on a CPU. With too
    little, completions wait for each other."""

    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Devices that share the model, each with a worker process of its own. At most the number of the model's
    key-value heads, of which it must be a divisor."""

    async_scheduling: bool = False
    """Whether a step is prepared while the GPU computes the one before, so that the GPU does not wait. Every
    completion then costs one more step, whose token is thrown away. It has not been tried on a GPU."""

    extra_arguments: Annotated[dict[str, Any], AfterValidator(_check_extra_arguments)] = Field(
        default_factory=dict
    )
    """Further arguments of vLLM's EngineArgs, by name, such as ``enforce_eager`` or ``block_size``. Nothing
    here checks what they do."""

    def device_ids(self, device: str) -> list[int] | None:
        """Return the GPUs to use, numbered among the visible ones; None: the first ones, or a CPU."""
        _, has_number, number = device.partition(":")
        return list(range(int(number), int(number) + self.tensor_parallel)) if has_number else None


class RemoteOptions(_Options):
    """Table ``[sampler.engine_options]`` where the engine is ``remote``."""

    address: str = Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
    """The vLLM server, such as ``http://127.0.0.1:8000``. It serves this sampler only. Its development
    endpoints ask for no key: whoever reaches the address controls it."""

    weights_dir: Path
    """Directory that server and sampler share, in memory best (``/dev/shm/heterorl``). Made here if missing,
    for this user alone. The server is told of it by ``HETERORL_WEIGHTS_DIR``, and may have it elsewhere."""

    api_key_file: Path | None = None
    """File with the server's API key. Unset: none is sent."""

    poll_s: float = Field(default=0.1, gt=0, le=10)
    """How long a new version or prompt may have to wait for its turn. Shorter costs CPU time."""

    answer_limit_s: float = Field(default=300.0, gt=0)
    """Longest time for an answer about anything but completions, and longest time in which completions get no
    token. Then the server is taken to hang, and is connected to again. Must have room for the longest decode
    step; keep it below ``sampler.engine_step_limit_s``."""

    start_limit_s: float = Field(default=900.0, gt=0)
    """Longest time to wait for the server to start, or to start again, and for it to verify its model against
    the files. Then the sampler ends."""

    def api_key(self) -> str | None:
        """Return the key; None: none is sent. StartupError if the file has none."""
        if self.api_key_file is None:
            return None
        return api_key_in(self.api_key_file, setting="api_key_file in sampler.engine_options")


_OPTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "torch": TorchOptions,
    "vllm": VllmOptions,
    "remote": RemoteOptions,
}


def check_options(engine: str, values: Mapping[str, Any]) -> None:
    """Check the options of a built-in engine; the ValueError lists all that are wrong."""
    if (model := _OPTIONS.get(engine)) is None:
        return
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise ValueError("; ".join(_fault(dict(fault), engine, model) for fault in faults)) from error


def _fault(fault: Mapping[str, Any], engine: str, model: type[BaseModel]) -> str:
    key, known = str(fault["loc"][0]), sorted(model.model_fields)
    if fault["type"] == "missing":
        return f"the engine {engine} needs the option {key!r}"
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, known, n=1)
        are = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"
        return f"the engine {engine} has no option {key!r}, {are}"
    rule = re.sub(r"^((Input|String) should|Value error,) ", "", fault["msg"])
    return f"{key} = {fault['input']!r} {rule if rule.startswith('must') else f'must {rule}'}"
