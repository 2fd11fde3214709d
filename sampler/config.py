"""Settings of a sampler. How completions are sampled is set for the whole run, in [coordinator]."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, create_model

from node.checks.check import Check, Finding, Grade, Needs, Surroundings
from node.checks.installed import model_check, packages_check
from node.config.settings import Target
from node.errors import COMMAND_LINE, ConfigError, StartupError
from node.grading.registry import built_in, grader_class, installed
from node.system.device import AUTO as AUTO_DEVICE
from node.system.device import Device
from node.system.extras import TORCH, NeededPackage
from node.text.tokenizer import chat_template
from node.values.limits import LEASES_PER_PEER
from sampler.engines.engine_options import check_options
from sampler.engines.engine_registry import AUTO, check_name, chosen_engine
from sampler.tasks.processes.grader_process import START_TIMEOUT_S, environment

_IMPORT: Final = "import pkgutil, sys; pkgutil.resolve_name(sys.argv[1])"

_RENDER: Final = """
import sys
from pathlib import Path
from node.errors import RefusedError
from sampler.engines.text.model_tokenizer import ModelTokenizer
try:
    ModelTokenizer(Path(sys.argv[1])).encode([{"role": "user", "content": "1+1="}])
except RefusedError as error:
    sys.exit(str(error))
"""


def _check_engine_options(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    # Where one of the two is wrong, that is its own fault.
    if {"engine", "device"} <= info.data.keys():
        check_options(chosen_engine(info.data["engine"], device=info.data["device"]), options)
    return options


def _chosen_process(process: str, info: ValidationInfo) -> str:
    if process != AUTO or not {"engine", "device"} <= info.data.keys():
        return process
    device = info.data["device"]
    is_vllm = chosen_engine(info.data["engine"], device=device) == "vllm"
    return "own" if is_vllm and device != "cpu" else "inside"


_GRADERS: Final = tuple(grader_class(name) for name in (*built_in(), *installed()))

if TYPE_CHECKING:
    _GraderKeys = BaseModel
else:
    _GraderKeys = create_model(
        "GraderKeys", __base__=tuple(grader.settings for grader in _GRADERS if grader.settings) or BaseModel
    )
    """The keys that graders declare for their peers."""


class GradingConfig(_GraderKeys):
    """Settings of every peer that makes prompts and grades; the keys of each grader are among them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    section: ClassVar[str]
    """Where these settings stand, for errors."""

    model_dir: Path
    """Directory of a causal language model, or of one that ranks (safetensors, tokenizer.json): version 0.
    Needs the learner's layout and tokenizer; later versions come from the hub. A verifier needs the tokenizer
    and the configuration alone."""

    custom_tasks: dict[str, str] = Field(default_factory=dict)
    """Task name -> ``package.module:Class``, for tasks that are not built in. Only this setting and the next
    name code to run; the coordinator sends a task's name, and its options as keyword arguments."""

    allowed_graders: tuple[str, ...] = ()
    """Functions ``package.module:function``, installed here, that the option ``grader`` of the task ``jsonl``
    may name; each is called with row and completion. Graders that other packages bring are named here as the
    option names them; those of this package need no permission. Name ``environment:load_environment`` for
    the option ``environment`` of the task ``verifiers``."""

    grader_environment: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Names of environment variables that graders and tasks get besides the usual ones (PATH, HOME, locale,
    caches, threads). A run's options can make an environment read any of them and send its value away: name
    none that holds a secret of another's."""

    grader_processes: int = Field(default=8, ge=1, le=64)
    """Most processes that run the task's code. One runs while the task answers at once, more when it is slow
    or hangs. With fewer, prompts that hang delay the others; each process holds the task's data in memory."""

    grader_wall_limit_s: float = Field(default=30.0, gt=0, le=3600)
    """Longest time to make one prompt or to grade one group; then the process is killed and the group given
    up."""

    grader_cpu_limit_s: int = Field(default=30, ge=1, le=3600)
    """CPU time for one prompt or one group; then the kernel ends the process."""

    grader_memory_limit_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Address space of each process. With too little it does not start."""

    needs_weights: ClassVar[bool]
    """Whether the role computes with the model, or reads texts only."""

    def checks(self, _: Surroundings) -> Iterator[Check]:
        """Yield the checks of packages, model, and what the role runs."""
        packages = packages_check(self.needed_packages)
        key = f"{self.section}.model_dir"
        model = model_check(self.model_dir, key=key, needs_weights=self.needs_weights)
        yield from (packages, model, Check("code", Needs.CODE, self._code, after=(packages, model)))

    def _code(self) -> Iterator[Finding]:
        """Import the tasks and graders that are named, and render the model's chat template.

        Raises:
            ConfigError: one cannot be imported.
            StartupError: the template does not take a question, or what a grader needs does not work here.
        """
        for grader in _GRADERS:
            grader.check_peer(self)
        self._check_imports("custom_tasks", self.custom_tasks.values())
        self._check_imports("allowed_graders", self.allowed_graders)
        if chat_template(self.model_dir) and (problem := self._problem(_RENDER, str(self.model_dir))):
            raise StartupError(
                f"the chat template of {self.model_dir} does not render a question: {problem}",
                fix="Correct chat_template.jinja or tokenizer_config.json there, or set chat = false in "
                "coordinator.task_options.",
            )
        yield Finding("code", Grade.OK, "all that is named of tasks, graders, sandbox and template works")

    def _check_imports(self, setting: str, paths: Iterable[str]) -> None:
        for path in paths:
            if problem := self._problem(_IMPORT, path):
                raise ConfigError(
                    key=f"{self.section}.{setting}",
                    value=path,
                    source="the configuration",
                    rule=f"cannot be imported: {problem}",
                    fix=f"Install it where this {self.section}'s Python finds it, or correct the name.",
                )

    def _problem(self, program: str, argument: str) -> str:
        """Run a program as graders run; return the last line that it ended with, empty where it worked."""
        try:
            ended = subprocess.run(
                [sys.executable, "-c", program, argument],
                env=environment(self.grader_environment),
                capture_output=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done after {START_TIMEOUT_S:.0f} s"
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        return "" if ended.returncode == 0 else (lines or [f"exit code {ended.returncode}"])[-1][:500]

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """Packages of a role that reads tokens, and what these settings need besides."""
        needed = [
            NeededPackage("--role", self.section, package, "sampler", COMMAND_LINE) for package in TORCH
        ]
        return (*needed, *(package for grader in _GRADERS for package in grader.needed_packages(self)))


class VerifierConfig(GradingConfig):
    """Section ``[verifier]``. It grades as the run's samplers do, so it needs what they need for that."""

    section: ClassVar[str] = "verifier"
    needs_weights: ClassVar[bool] = False

    groups_at_once: int = Field(default=8, ge=1, le=256)
    """How many groups it takes before it has answered for the first. More wait here in place of the
    coordinator, where another verifier could take them. Samplers whose groups are slow to grade have a
    quarter of these, or of ``grader_processes`` if those are fewer; below four they take turns."""


class SamplerConfig(GradingConfig):
    """Section ``[sampler]``."""

    section: ClassVar[str] = "sampler"
    needs_weights: ClassVar[bool] = True

    device: Device = Field(default=AUTO_DEVICE, validate_default=True)
    """Where the model generates. ``auto`` is cuda where there are a GPU and a torch built for one, else
    cpu."""

    engine: Annotated[str, AfterValidator(check_name)] = AUTO
    """Name of the engine that generates, or the import path of one's own, ``package.module:function``.
    ``torch`` runs transformers models on any device that torch supports; ``vllm`` generates several times
    faster; ``remote`` is a vLLM server that runs beside the sampler; ``auto`` is vllm where a build of it for
    the device is installed, else torch; models of another kind of policies have the engine of its name."""

    engine_options: Annotated[dict[str, Any], AfterValidator(_check_engine_options)] = Field(
        default_factory=dict, validate_default=True
    )
    """Options of the chosen engine; see ``sampler.engines.engine_options``."""

    engine_process: Annotated[Literal["auto", "inside", "own"], AfterValidator(_chosen_process)] = Field(
        default="auto", validate_default=True
    )
    """Whether the engine runs inside the sampler's process or in one of its own. In one of its own it shares
    no interpreter with grading and encoding, which on a GPU take longer than a decode step; where it hangs or
    dies it is loaded again and the sampler goes on. It costs some memory and start-up time, and new versions
    are written in place, which takes longer. Inside, a hang ends the sampler, and a crash is the sampler's.
    ``auto`` is own for vllm on a GPU, else inside."""

    engine_step_limit_s: float = Field(default=900.0, gt=0)
    """Longest time of one decode step, or of one change of version between two. Then the engine is taken to
    hang. Too short a limit ends engines that read long prompts."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type to compute in. float32 holds published floats exactly; bfloat16 halves memory and makes
    behaviour logprobs differ from the learner's by some hundredths of a nat per token."""

    apply: Literal["auto", "spare", "in_place"] = "auto"
    """How a new version becomes the one sampled from. ``spare`` assembles it in a second copy of the weights;
    the swap pauses generation for milliseconds. ``in_place`` writes it over the only copy, which takes half
    the memory and pauses generation for as long as decoding takes. ``auto`` is spare where the engine can
    (torch), else in place (vllm)."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor work; 0 leaves the choice to torch."""

    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Seed of the sampling. Unset: a new one at each start, so that no two samplers draw the same."""

    concurrency_groups: int | None = Field(default=None, ge=1, le=LEASES_PER_PEER)
    """Groups generated at once. More of them use the device better, need more memory and make each group
    take longer, so that it is staler. Unset: as many as fill the engine, by its memory for keys and values
    and the completions that it draws at once. The metric sampler_concurrency_groups has the number."""

    outbox_groups: int = Field(default=16, ge=1, le=4096)
    """Length of the submission queue: finished groups kept while the hub is away or slow. No more prompts are
    leased while it is full."""

    relays: tuple[Target, ...] = ()
    """Relays, ``host:port`` each: weights are fetched from all of them, and the coordinator is reached
    through the first that leads to it, else at ``node.coordinator``, which may be unset where no way leads
    there from here. Empty: all comes from the coordinator."""

    weight_sources: tuple[Target, ...] = ()
    """More relays to fetch weights from (or the coordinator, as in ``node.coordinator``), ``host:port`` each,
    in parallel, in proportion to what they deliver. The coordinator is asked only when all of them are behind
    it."""

    save_policy_every_s: float = Field(default=60.0, ge=0)
    """Shortest time between two copies of the held policy on disk. In between, fetched deltas are logged, and
    a restarted sampler applies the log to the copy. Longer spares the disk and makes starts slower."""

    price_per_hour: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    """Price of this sampler's machine, in a currency that all samplers of the run use. It is shown in metrics
    and dashboards, and changes nothing else; 0: unknown."""

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """The same, and what the engine needs."""
        needed = [*super().needed_packages]
        if self.engine == "vllm":
            needed.append(NeededPackage("sampler.engine", "vllm", "vllm", extra="vllm"))
        if self.engine == "remote":
            needed.append(NeededPackage("sampler.engine", "remote", "httpx", extra="remote"))
        return tuple(needed)
