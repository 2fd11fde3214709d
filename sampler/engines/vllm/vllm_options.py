"""Options of the vllm engine."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_OURS: Final[Mapping[str, str]] = {
    "model": "sampler.model_dir is loaded",
    "tokenizer": "sampler.model_dir's is used",
    "dtype": "set sampler.compute_dtype",
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
    "async_scheduling": "a step must have ended before the weights change",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}
"""Arguments of vLLM's that are set here or must not be set, and why."""


def _check_extra_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in arguments.keys() & _OURS.keys():
        raise ValueError(f"must not have {name!r}: {_OURS[name]}")
    return arguments


class VllmOptions(BaseModel):
    """Table ``[sampler.engine_options]`` where the engine is vllm."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    context_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt and a completion together. Fewer leave memory for more completions at once.
    Unset: as many as the model allows and the memory for keys and values holds."""

    batch: int = Field(default=256, ge=1, le=65536)
    """Most completions generated at once; the rest waits. At most sampler.concurrency_groups times the size
    of a group are added."""

    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory for weights, keys and values. Lower it where something else uses the GPU."""

    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory for keys and values. Unset: what ``memory_share`` leaves of a GPU, 1 GiB on a CPU. With too
    little, completions wait for each other."""

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What becomes of the keys and values of running completions when a version is swapped in. ``recompute``
    costs one pass over their tokens and makes every logprob that of the version it names. ``keep`` costs
    nothing; logprobs are still those the tokens were drawn from, but of a mixture of versions."""

    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Devices that share the model, each with a worker process of its own. At most the number of the model's
    key-value heads, of which it must be a divisor."""

    extra_arguments: Annotated[dict[str, Any], AfterValidator(_check_extra_arguments)] = Field(
        default_factory=dict
    )
    """Further arguments of vLLM's EngineArgs, by name, such as ``enforce_eager`` or ``block_size``. Nothing
    here checks what they do."""
