"""Settings of a sampler; how completions are sampled is the run's business: see [coordinator]."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from node.config.settings import Target


class SamplerConfig(BaseModel):
    """Section ``[sampler]``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path
    """Directory of a causal language model (safetensors, tokenizer.json): version 0 of the run.
    Needs the learner's layout and tokenizer; later versions come from the hub."""

    engine: Literal["torch"] = "torch"
    """What generates. ``torch`` runs transformers models on any device torch has."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where the model generates."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What published floats are computed in. float32 uses them exactly; bfloat16 halves memory and makes
    behaviour logprobs differ from the learner's by some hundredths of a nat per token."""

    apply: Literal["spare", "in_place"] = "spare"
    """How a new version becomes the one that is sampled from. ``spare`` puts it together in a second copy of
    the weights, and changing to it holds generation up for milliseconds. ``in_place`` writes it over the one
    copy there is, which takes half the memory and holds generation up for as long as decoding takes."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor work; 0 leaves the choice to torch."""

    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Seed of the sampling. Unset: a new one each start, so that no two samplers draw alike."""

    concurrency_groups: int = Field(default=8, ge=1, le=4096)
    """Groups generated at once. More fill the device better, need more memory and make each group
    take longer, hence staler."""

    outbox_groups: int = Field(default=16, ge=1, le=4096)
    """Finished groups kept while the hub is away or slow. When full, no more work is leased."""

    weight_sources: tuple[Target, ...] = ()
    """Relays (or the coordinator) to take weights from, ``host:port`` each, used at once in proportion to
    what they deliver. The coordinator is asked only when they are all behind it; empty: always."""

    rollout_via: Target | None = None
    """A relay that takes finished groups in, ``host:port``, and keeps them on its disk while the coordinator
    is away. Unset: the coordinator takes them itself."""

    custom_tasks: dict[str, str] = Field(default_factory=dict)
    """Task name -> ``package.module:Class``, for tasks that are not built in. Code is only ever named
    here, never by the coordinator."""

    grader_processes: int = Field(default=8, ge=1, le=64)
    """Most processes that run the task's code: one runs where it answers at once, more where it is slow or
    hangs. With fewer, prompts that hang hold up good ones; each holds the task's data in memory."""

    grader_wall_limit_s: float = Field(default=30.0, gt=0, le=3600)
    """Time to make one prompt, or to grade one group; then the process is killed and the group given up."""

    grader_cpu_limit_s: int = Field(default=30, ge=1, le=3600)
    """CPU time for the same; then the kernel ends the process."""

    grader_memory_limit_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Address space of each process. Too little and it does not start."""

    save_policy_every_s: float = Field(default=60.0, ge=0)
    """Shortest time between two copies of the held policy on disk. In between, what is fetched is logged,
    and a restarted sampler applies the log to the copy: longer spares the disk and starts slower."""
