"""Settings of the coordinator: the run's, which every peer gets, and its own."""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator

from node.checks.check import Check, Finding, Grade, Needs, Surroundings
from node.checks.installed import model_check, packages_check
from node.config.settings import Address, BucketUrl, bucket_packages
from node.coordinator.data.data_check import DataUse, data_check
from node.coordinator.data.data_config import DataConfig
from node.coordinator.evaluation_config import EvaluationConfig, copied
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.terms.run_terms import NO_EVALUATION, EvaluationSettings, RunTerms, Work
from node.errors import ConfigError
from node.system.extras import NeededPackage
from node.tasks.built_in_tasks import BUILT_IN
from node.tasks.task_options import TaskOptions, checked_options, options_json, options_model
from node.values import limits
from node.values.groups.sampling_parameters import SamplingParameters

Value = TypeVar("Value")

StopString = Annotated[str, Field(min_length=1, max_length=limits.STOP_STRING_CHARACTERS)]


class CoordinatorConfig(BaseModel):
    """Section ``[coordinator]``. Every peer of the run gets the first group of values when it joins."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    task: str = Field(min_length=1, max_length=200)
    """Name of the task that samplers take prompts from and grade by; one of theirs, built in or custom."""
    prompts: int | None = Field(default=None, ge=1, le=1 << 40)
    """Number of prompts the task has; each is leased once per epoch. A sampler whose task has another number
    is refused. Unset: the number of rows of ``data``, or what the task's options say (reasoning_gym: size).
    Other tasks need it; `heterorl-node try` counts their prompts. A change in mid-run reorders the prompts
    that follow."""
    data: DataConfig | None = None
    """The data set; see ``[coordinator.data]``. Unset: the task has its own prompts."""
    task_options: dict[str, JsonValue] = Field(default_factory=dict, validate_default=True)
    """The task's options, sent to every sampler. Those of the built-in tasks are in
    node/tasks/task_options.py; a custom task gets them as keyword arguments. After a change and a restart of
    the coordinator samplers load the task again, and groups graded before are not trained on."""
    grader_digest: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    """Digest of the grader code that groups must be graded by, as `heterorl-node status --json` and `try`
    show it. Empty: as a verifier says. Without a verifier no grader code is refused, and `status` shows where
    samplers differ."""
    graded_by: Literal["sampler", "verifier"] = "sampler"
    """Who grades. "verifier": samplers send tokens alone, and groups wait until a verifier has graded them.
    Then judges and graders that do not repeat themselves are asked by machines you trust. Samplers need
    neither judge nor sandbox; verifiers must keep up with all of them. Not for tasks that reply or keep
    state, nor with evaluation. After a change groups graded before are not trained on."""
    require_verifier: bool = False
    """Whether groups wait while no verifier is there to check rewards. The run stands still then, and where
    the task's grader does not repeat itself it never begins. Off, rewards are believed meanwhile, and checked
    once a verifier is back, as far as the ledger has room for them."""
    newcomers_part: float = Field(default=0.25, gt=0, le=1)
    """Part of a batch, but at least one group, that samplers may fill whose rewards have hardly been checked,
    while others are at work. Lower bounds what strangers can do before they are found out; they are slower to
    help. 1: no bound."""
    prompt_retry_s: float = Field(default=600.0, ge=0, le=30 * 86_400)
    """Time for which a prompt is passed over once its attempts have failed (too long, a grader that raises or
    hangs); doubled each time it fails again, up to a day. A group for the prompt ends that. Shorter spends
    more on prompts that stay bad; 0, with a restart, brings them all back once the task is repaired."""
    prompt_seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the order of prompts within each epoch. A change in mid-run reorders later prompts."""
    group_size: int = Field(default=8, ge=2, le=limits.GROUP_COMPLETIONS)
    """Completions per prompt. More make the advantage less noisy and every group more expensive; with fewer
    than 2 there is no advantage at all."""
    batch_groups: int = Field(default=8, ge=1, le=65_536)
    """Groups per gradient step. More make steps steadier and rarer."""
    max_staleness_versions: int = Field(default=8, ge=0, le=4096)
    """Oldest behaviour version the learner takes, in versions before its own. Higher keeps distant
    samplers useful and demands more of the objective; 0 makes everyone wait for everyone. While the run goes
    on, `heterorl-node status` shows the lag beyond which groups may be worth half."""
    temperature: float = Field(default=1.0, ge=limits.LEAST_TEMPERATURE, le=limits.LARGEST_TEMPERATURE)
    """Softmax temperature of sampling, 0.01 to 2. 1 samples the model itself, which importance weights
    expect."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass kept. Below 1 the learner corrects each weight by the mass that was kept, which is exact
    on policy only, and learns nothing about tokens that were cut off. Leave it at 1 unless the task needs
    it."""
    top_k: int = Field(default=0, ge=0, le=1 << 24)
    """Tokens kept; 0: all. Has the same cost as top_p."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens less likely than this share of the likeliest one are cut off, before top_k and top_p; 0: none.
    Has the same cost as top_p."""
    stop: tuple[StopString, ...] = Field(default=(), max_length=limits.STOP_STRINGS)
    """A completion ends once its text contains one of these. The policy is trained on their tokens; the text
    that is graded ends before them. Special tokens have no text; end tokens end a completion in any case."""
    max_new_tokens: int = Field(default=32, ge=1, le=1 << 20)
    """Length at which a completion is cut, all its turns and replies together. Longer costs memory and time
    on every sampler."""
    evaluation: EvaluationConfig | None = None
    """How versions are evaluated on held-out prompts; unset: not at all."""
    heartbeat_interval_s: float = Field(default=2.0, ge=0.05, le=60)
    """Shortest time between heartbeats of each peer. Shorter shows lag sooner. Samplers are told to wait
    longer where there are more than 1000 for each second of it: the fleet sends 1000 a second at most."""

    model_dir: Path | None = None
    """The learner's model directory, or a copy: samplers that join with `heterorl-node join` and have none
    fetch it from here. Unset: they are given theirs."""
    listen: Address = "127.0.0.1:7700"
    """Where members connect. Port 0: any free one, printed at the start."""
    enrolment_listen: Address = "127.0.0.1:7701"
    """Where new peers exchange a token for a certificate. Unused where TLS is off."""
    certificate_lifetime_s: float = Field(default=365 * 86_400, ge=10, le=3650 * 86_400)
    """How long a member's certificate lasts; members fetch the next one by themselves in its last third.
    Shorter shuts out sooner who has only stolen a key; a peer that is off for longer enrols again with a
    token. The coordinator's, learner's and operator's from `init` last ten years."""
    ledger: str | None = Field(default=None, max_length=1000)
    """The PostgreSQL database of the run's ledger, as postgresql://USER@HOST/DATABASE?sslmode=verify-full.
    Coordinators that share it take over from each other. The password stands in PGPASSWORD or in a file
    (?passfile=FILE), since settings are logged. Unset: a SQLite file in the state directory."""
    concurrency_groups: int = Field(default=256, ge=1, le=65_536)
    """Groups that may be leased at once. Fewer than all samplers together can work on leaves some idle."""
    buffer_groups: int = Field(default=256, ge=1, le=65_536)
    """Groups kept on disk until trained on. When full, samplers wait."""
    buffer_bytes: int = Field(default=2 << 30, ge=1 << 20, le=1 << 44)
    """Size of those groups together, if that is reached first; one batch, or what a merged version
    consumes, is always taken. A group takes 12 to 16 bytes a token: eight completions of 4096 tokens:
    half a MiB. The disk needs twice this, for the ledger's -wal file."""
    lease_ttl_s: float = Field(default=120.0, ge=1, le=86_400)
    """Time after the last heartbeat of its holder at which a lease ends. Shorter passes a dead sampler's
    prompts on sooner; shorter than a cut that samplers survive gives away prompts they will still answer."""
    lease_max_s: float = Field(default=3600.0, ge=1, le=30 * 86_400)
    """Largest age of a lease, whatever its holder's heartbeats say. Leases end earlier where samplers deliver
    faster: at four times the slowest recent delivery. Set it above four times the longest group of the
    slowest sampler; lower frees sooner what a hoarder took before the first group of a run."""
    silent_after_s: float = Field(default=20.0, ge=0.1, le=3600)
    """Time without a heartbeat after which a peer is shown as silent, and another process may take its
    name; at least three of the pauses between heartbeats that a large fleet makes. A machine that lost its
    power and is back sooner waits until then."""
    retained_keyframes: int = Field(default=2, ge=1, le=64)
    """Keyframes kept on disk, with every delta after the oldest of them. More serve peers that were away
    longer; each costs the model's size."""

    bucket: BucketUrl | None = None
    """Object store in which the coordinator puts the weights it serves: ``s3://NAME/PREFIX``, ``gs://`` or
    ``az://``. Peers read them there by signed addresses, so that its own link carries each once. Credentials
    come from the provider's environment variables or the machine's role. Unset: it serves them itself."""

    @field_validator("ledger")
    @classmethod
    def _is_a_database_without_a_password(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/"):
            raise ValueError("is not postgresql://USER@HOST/DATABASE")
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError("holds a password, and settings are logged; put it in PGPASSWORD or a passfile")
        return url

    @field_validator("task_options")
    @classmethod
    def _are_the_tasks(cls, options: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        checked_options(info.data.get("task", ""), options)
        return options

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if self.task in BUILT_IN and options_model(self.task).takes_rows != (self.data is not None):
            if self.data is None:
                raise ValueError(f"task = {self.task!r} needs rows: write [coordinator.data] with file = ...")
            raise ValueError(f"task = {self.task!r} makes its own prompts: leave [coordinator.data] out")
        if self.data is not None and self.prompts is not None:
            raise ValueError("with [coordinator.data] the number of prompts is known: leave prompts out")
        if self.verifiers_grade and (every := self.evaluation_settings.every_versions):
            raise ValueError(
                f"evaluation.every_versions = {every} with graded_by = 'verifier': held-out prompts are "
                "scored by the rewards that samplers send; set every_versions = 0, or graded_by = 'sampler'"
            )
        if self.buffer_groups < self.batch_groups:
            raise ValueError(
                f"buffer_groups = {self.buffer_groups} is below batch_groups = {self.batch_groups}: "
                "no batch would ever fill; raise buffer_groups"
            )
        if self.lease_max_s < self.lease_ttl_s:
            raise ValueError(
                f"lease_max_s = {self.lease_max_s} is below lease_ttl_s = {self.lease_ttl_s}, the term of "
                "a lease without heartbeats; raise lease_max_s"
            )
        if self.lease_ttl_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"lease_ttl_s = {self.lease_ttl_s} is below two heartbeats of {self.heartbeat_interval_s} s: "
                "one late heartbeat would end a lease; raise lease_ttl_s"
            )
        evaluated, held_out = self.evaluation_settings.prompts, self.evaluation_settings.held_out_prompts
        if self.data is not None and self.data.evaluation_rows < evaluated:
            raise ValueError(
                f"evaluation.prompts = {evaluated}, and data.evaluation_rows = {self.data.evaluation_rows} "
                f"rows are held out; set data.evaluation_rows = {evaluated}"
            )
        known = self.known_prompts
        if known is not None and known <= held_out:
            raise ValueError(
                f"prompts = {known}, of which evaluation.prompts = {held_out} are held out: "
                "none is left to train on; lower evaluation.prompts"
            )
        return self

    def checks(self, around: Surroundings) -> Iterator[Check]:
        """Yield the checks of packages, model and data."""
        packages = packages_check(self.needed_packages)
        yield packages
        if self.model_dir is not None:
            yield model_check(self.model_dir, key="coordinator.model_dir")
        if self.data is not None:
            use = DataUse(
                self.built_in_options,
                self.columns,
                self.max_new_tokens,
                ledger=None if self.ledger is not None else around.state_dir / FILE_NAME,
                model_dir=around.model_dir,
            )
            yield data_check(self.data, use, told=around.told, after=packages)
        else:
            yield Check("prompts", Needs.CONFIGURATION, self._count_prompts)

    def _count_prompts(self) -> Iterator[Finding]:
        yield Finding("prompts", Grade.OK, f"the task has {self.own_prompts()}")

    @property
    def built_in_options(self) -> TaskOptions | None:
        """Options of a built-in task; None: a custom task has its own."""
        return checked_options(self.task, self.task_options)

    @property
    def columns(self) -> Mapping[str, str]:
        """Option of the task -> column that rows need."""
        options = self.built_in_options
        return {} if options is None else options.columns

    @property
    def known_prompts(self) -> int | None:
        """Number of prompts, as configured here; None: only the data or the task can tell."""
        options = self.built_in_options
        return self.prompts if self.prompts is not None or options is None else options.prompts

    def own_prompts(self) -> int:
        """Return the number of prompts of a task that has its own.

        Raises ConfigError: it is not configured, and only the task knows.
        """
        if (prompts := self.known_prompts) is None:
            raise ConfigError(
                key="coordinator.prompts",
                value="unset",
                source="the configuration",
                rule=f"the task {self.task!r} counts its own prompts, and no sampler's word decides for all",
                fix="Set it to their number, which `heterorl-node try` shows.",
            )
        return prompts

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """The packages that read the data, reach the database and fill the bucket."""
        data = () if self.data is None else self.data.needed_packages
        bucket = bucket_packages("coordinator.bucket", self.bucket)
        if self.ledger is None:
            return (*data, *bucket)
        return (*data, *bucket, NeededPackage("coordinator.ledger", self.ledger, "psycopg", "postgresql"))

    @property
    def evaluation_settings(self) -> EvaluationSettings:
        """How versions are evaluated."""
        if self.evaluation is None:
            return NO_EVALUATION
        has_rows, options = self.data is not None, self.task_options
        return self.evaluation.settings(
            self.sampling, has_rows=has_rows, task=self.task, task_options=options
        )

    @property
    def verifiers_grade(self) -> bool:
        return self.graded_by == "verifier"

    @property
    def task_digest(self) -> bytes:
        """Digest of the task's name and options, and of who grades it where samplers do not."""
        by = [self.graded_by] if self.verifiers_grade else []
        named = json.dumps([self.task, self.task_options, *by], sort_keys=True)
        return hashlib.sha256(named.encode()).digest()[:16]

    @property
    def task_options_json(self) -> str:
        return options_json(self.task_options)

    @property
    def sampling(self) -> SamplingParameters:
        return copied(self, SamplingParameters)

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of a prompt, as far as the configuration says."""
        options = self.built_in_options
        stated: int | None = getattr(options, "max_prompt_tokens", None)
        return limits.PROMPT_TOKENS if stated is None else stated

    def terms(self, run_id: str, *, prompts: int) -> RunTerms:
        """Return what the run asks of samplers."""
        return copied(
            self,
            RunTerms,
            work=copied(self, Work, run_id=run_id),
            bounds=copied(self, Bounds),
            prompts=prompts,
            evaluation=self.evaluation_settings,
            check_secret=secrets.token_bytes(16),
        )
