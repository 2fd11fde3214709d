"""Settings of the learner ([learner] in the configuration file)."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from learner.merging.merge_config import MergeConfig
from learner.sizing.mesh_sizes import MeshSizes
from learner.step_settings import Packing, StepSettings
from node.checks.check import Check, Surroundings
from node.checks.installed import model_check, packages_check
from node.checks.machine_checks import listen_check
from node.errors import COMMAND_LINE
from node.system.device import AUTO, Device
from node.system.extras import TORCH, NeededPackage

Rematerialise = Literal["none", "layers", "selective"]


class RanksConfig(BaseModel):
    """The model that a learner or a contributor trains, and the ranks of its site that share it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    section: ClassVar[str]
    """Its section in the configuration file, which is its role."""

    model_dir: Path
    """Directory of a causal language model (safetensors, tokenizer.json): version 0 of the run.
    Read once; every sampler needs the same weights, layout and tokenizer."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products; the parameters being trained are float32 either way. bfloat16 is fast on
    devices that have it, and moves learner logprobs by about 0.05 nats a token."""

    rematerialise: Rematerialise = "none"
    """Parts of each layer computed again for the backward pass instead of kept. ``layers``: all but its
    input, which is a third more work, and leaves memory for many more tokens. ``selective``: all but the
    results of products and attention, which is little more work."""

    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the model, each in ranks of its own, which share out the rows of a step. More cost memory and
    save exchanges. The product of this, ``dp_shard``, ``tp`` and ``pp`` is the number of ranks, processes
    that the role starts on its host unless torchrun started them."""

    dp_shard: int = Field(default=1, ge=1)
    """Ranks over which parameters, gradients and moments of each copy are sharded (FSDP2), and its rows
    shared out. Each holds one part in so many, and gathers a layer at a time."""

    tp: int = Field(default=1, ge=1)
    """Ranks that slice every layer and the vocabulary, and work on the same rows (tensor parallelism). Needs
    a fast link between them. Families whose slices are not known get FSDP2 over these ranks too."""

    pp: int = Field(default=1, ge=1)
    """Ranks that have a run of the layers each and pass hidden states on (pipeline parallelism); at most as
    many as layers. Needs the least of links, and memory for several micro-batches. Those are cut until each
    stage has four, and padded to the largest."""

    offload: bool = False
    """Keep parameters, gradients and moments of a GPU's shard in the host's memory, and take the optimizer's
    step there. Needs ``dp_shard`` above 1; changes nothing on a CPU. Untested on GPUs."""

    rank_timeout_s: float = Field(default=600.0, ge=1, le=86_400)
    """Longest wait of ranks for each other: at the start, in a step, as they publish, as they save. One that
    is stopped for longer ends all of them; the next start resumes the run. Each rank's part of a checkpoint
    has to be written within this time."""

    device: Device = Field(default=AUTO, validate_default=True)
    """Device the model is trained on. ``auto`` is cuda where there are a GPU and a torch built for it, else
    cpu. A journal is taken up again on the device that it was written with."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank for tensor work; 0 leaves the choice to torch, or shares the cores out."""

    @property
    def mesh(self) -> MeshSizes:
        """The mesh of the ranks that share the model."""
        return MeshSizes(self.dp_replicate, self.dp_shard, self.tp, self.pp)

    def checks(self, _: Surroundings) -> Iterator[Check]:
        """Yield the checks of packages and model."""
        yield packages_check(self.needed_packages)
        yield model_check(self.model_dir, key=f"{self.section}.model_dir")

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """The packages of a learner."""
        role = ("--role", self.section)
        return tuple(NeededPackage(*role, package, "learner", COMMAND_LINE) for package in TORCH)

    @model_validator(mode="after")
    def _only_shards_are_offloaded(self) -> Self:
        if self.offload and self.dp_shard == 1:
            raise ValueError("offload needs dp_shard above 1, which is 1: set dp_shard, or leave offload out")
        return self


class LearnerConfig(StepSettings, RanksConfig):
    """Settings of the learner. Batch size and staleness bound belong to the run: see [coordinator]."""

    section: ClassVar[str] = "learner"

    packing: Packing = "prefixes"
    """With ``prefixes`` a step's completions are packed without padding, and what several begin with, such as
    their prompt, is computed once. With ``none`` they are padded, row by row. So they are, as the log then
    says, where the model's family was not tested with packs. Steps differ by the rounding of sums alone."""

    quarantine_mismatch_nats: float = Field(default=0.05, gt=0)
    """Mean KL a token from a sampler's groups to the versions that they name, scored again with the words of
    these, beyond which, by three standard errors, that sampler's groups are refused, but for one now and then
    that shows whether it fits again. Scoring takes up to 5 % of the learner's time, 20 %
    while a sampler is there that has named another version than it drew from. A learner of several
    ranks cannot, and goes by what groups show in excess of others at the same staleness. Infinity: never."""

    publish_threads: int = Field(default=0, ge=0)
    """CPU threads of each rank that code a version; 0: one per core, or as many as compute where there are
    several ranks. Fewer leave more for training, and a version is ready later."""

    buffer_groups: int = Field(default=64, ge=1)
    """Groups held in memory at most. Less than one batch would never fill a batch."""

    checkpoint_every_versions: int = Field(default=20, ge=1, le=10_000)
    """Steps from one full checkpoint (12 bytes a parameter) to the next. More write less; a learner that was
    killed takes the steps since the last one again, which lasts as long as they did."""

    checkpoint_every_s: float = Field(default=1800.0, ge=1)
    """Longest time from one checkpoint to the next, if steps were taken meanwhile. Infinity: no limit."""

    journal_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Size of the journal from which training waits for a checkpoint; one is begun at a quarter of it. A
    step's entry is as large as its groups, about 16 bytes a token. The disk also holds two checkpoints, and a
    third while it is written."""

    keep_every_versions: int = Field(default=0, ge=0)
    """Keep the float32 masters of every version that is a multiple of this, to be exported later; each is
    four bytes a parameter on disk, and a checkpoint is made for it. 0: only what was published lately, the
    newest checkpoints, the best version and ``keep_spaced_versions`` others can be exported."""

    keep_spaced_versions: int = Field(default=4, ge=0, le=64)
    """Keep so many keyframes older than the versions published lately, for a rollback or an export: one for
    each doubling of the distance, which begins at ``keyframe_every_versions``. With both defaults a rollback
    reaches 500 to 1000 versions back. Each is 1.4 bytes a parameter on disk. 0: none."""

    samples_every_versions: int = Field(default=10, ge=0)
    """Write down some groups of every batch whose version is a multiple of this, as text with rewards, for
    ``heterorl-node samples`` and the page of ``telemetry.http_listen``; 0: none. Up to 64 MiB."""

    samples_groups: int = Field(default=2, ge=1, le=64)
    """Groups of each such batch, drawn at random."""

    tensorboard_dir: Path | None = None
    """Directory of TensorBoard's event files: the numbers of each step, as in the metrics. Needs the extra
    ``tensorboard``."""

    wandb_project: str | None = Field(default=None, min_length=1)
    """Project of Weights & Biases that gets the same numbers, in a run named after this one. Needs the extra
    ``wandb``, and WANDB_API_KEY or WANDB_MODE=offline in the environment. A tracker that fails is counted
    and never stops training."""

    keyframe_every_versions: int = Field(default=64, ge=1)
    """Versions from one keyframe, which needs no base, to the next. A shorter distance lets a late sampler in
    with fewer bytes; a longer one uploads less."""

    public_delta_every_versions: int = Field(default=16, ge=1)
    """Versions from one delta of the public base model to the next. Every sampler has that model on disk, so
    a new sampler, or one that was away for long, joins with the fewest bytes. Made in spare time."""

    max_versions: int = Field(default=0, ge=0)
    """Version after which the learner publishes, drains and ends the daemon; 0: never. A batch that teaches
    nothing makes no version."""

    stop_at_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Mean training reward over ``stop_window_versions`` at which it does the same. Unset: never."""

    stop_window_versions: int = Field(default=16, ge=1, le=10_000)
    """Newest batches whose mean reward counts, here and, where no version is evaluated, for which one is
    kept as the best. Those that teach nothing are among them. A short window stops at a lucky batch."""

    merge: MergeConfig | None = None
    """Contributors take the steps, on other sites, and this learner merges what they hand in; see
    ``[learner.merge]``. It needs no GPU then. Unset: it takes the steps itself."""

    def checks(self, surroundings: Surroundings) -> Iterator[Check]:
        """Yield the checks of packages and model, and of the port for contributors if there is one."""
        yield from super().checks(surroundings)
        if self.merge is not None:
            yield listen_check(self.merge.listen, key="learner.merge.listen")

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """The packages of a learner, and of the trackers that are configured."""
        trackers = {"tensorboard": "tensorboard_dir", "wandb": "wandb_project"}
        return (
            *super().needed_packages,
            *(
                NeededPackage(f"learner.{key}", str(getattr(self, key)), package, extra=package)
                for package, key in trackers.items()
                if getattr(self, key) is not None
            ),
        )

    @model_validator(mode="after")
    def _one_rank_merges(self) -> "LearnerConfig":
        if self.merge is not None and self.mesh.ranks > 1:
            raise ValueError(
                f"a learner with [learner.merge] is one rank, and dp_replicate, dp_shard, tp and pp make "
                f"{self.mesh.ranks}: leave them out here, contributors may have several"
            )
        return self
