"""A run as values: settings, steps, status."""

import enum
from dataclasses import dataclass, field
from typing import Final

from node.values import limits
from node.values.bottleneck import Bottleneck
from node.values.evaluation import NO_EVALUATIONS, EvaluationStatus
from node.values.groups.failure import BadPrompt
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import PolicyVersion
from node.values.roles import Role


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings that the coordinator sends to every peer that joins."""

    task: str
    group_size: int
    batch_groups: int
    max_staleness_versions: int
    heartbeat_interval_s: float
    head: PolicyVersion | None
    sampling: SamplingParameters
    task_options_json: str = ""
    """A JSON object; empty: none."""
    prompts: int = 0
    """Number of prompts, where the coordinator has their rows; 0: the task has its own."""
    group_bytes: int = limits.ROLLOUT_MESSAGE_BYTES
    """Size of the largest encoded group: hubs take no larger one."""
    task_digest: bytes = b""
    """Digest of the task's name and options."""
    grader_digest: bytes = b""
    """Digest of the code that grades; empty: neither the configuration nor a verifier has said yet."""
    grader_said_by: str = ""
    """Who says so, for people."""
    verifiers_grade: bool = False
    """Whether verifiers grade the run's groups; otherwise samplers do."""


@dataclass(frozen=True, slots=True)
class RecommendedStaleness:
    """The staleness bound that the measured drift recommends; fields as in membership.proto."""

    versions: int | None
    sample: str
    unknown_because: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Statistics of one gradient step; fields as in membership.proto."""

    version: int
    reward_mean: float
    staleness_mean_versions: float
    staleness_max_versions: int
    kl_nats: float
    ess_ratio: float
    clip_fraction: float
    gradient_norm: float
    step_s: float
    surprisal_nats: float
    """Minus the mean learner logprob of the batch's tokens, nats."""
    recommended_staleness: RecommendedStaleness | None = None
    """As of this step. None: not worked out yet."""
    grader_metrics: dict[str, float] = field(default_factory=dict)
    """Grader metrics besides the reward, by name: the mean over the groups that have it."""
    groups_wait_s: float | None = None
    """The learner's wait for groups since the step before. None: not known."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """How much the newest batches taught; fields as in membership.proto."""

    groups: int
    uninformative_groups: int
    reward_mean: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The groups a step consumed, and how stale each was."""

    version: int
    group_ids: tuple[str, ...]
    staleness_versions: tuple[int, ...]
    restored_version: int | None = None
    """The version whose weights an operator's rollback restored; it consumed no group. None: a step."""


class SamplerStanding(enum.StrEnum):
    """A sampler's standing in a word. Closed: also the ``standing`` label of metrics."""

    NEWCOMER = "newcomer"
    """It has delivered nothing yet."""
    ESTABLISHED = "established"
    HOARDS = "hoards"
    """It holds leases for long, or lets them expire, and delivers less than that."""
    FAILING = "failing"
    """More of its leases fail than are answered: it gets one at a time."""
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One row of the lag table; fields as in membership.proto."""

    node_id: str
    role: Role
    state: str
    held: PolicyVersion | None
    version_lag_versions: int
    lag_s: float
    last_seen_s: float
    clock_offset_s: float
    waits_for: str
    verdicts: dict[str, int]
    staleness_mean_versions: float
    joins: int
    refused_twins: int
    refused_twin_s: float
    grader_digest: bytes = b""
    """Digest of a sampler's grader code; empty: not told yet."""
    leases: int = 0
    """Held now."""
    lease_allowance: int = 0
    """How many it may hold by what it delivered; 0: it never had one."""
    oldest_lease_s: float = 0.0
    standing: str = ""
    """A sampler's standing; see ``SamplerStanding``."""
    standing_detail: str = ""
    software_version: str = ""
    protocol: int = 0
    """The newest that it speaks."""
    machine: MachineFigures | None = None
    sampler: SamplerFigures | None = None


@dataclass(frozen=True, slots=True)
class PeerQuery:
    """A page of the peers that meet all conditions; fields as in membership.proto."""

    states: tuple[str, ...] = ()
    """Empty: any; as in what follows."""
    roles: tuple[str, ...] = ()
    standings: tuple[str, ...] = ()
    name: str = ""
    """Part of the node id."""
    waits_for: str = ""
    """Part of what the peer waits for."""
    sort_by: str = ""
    """One of ``PEER_ORDERS``; empty: the first."""
    is_reversed: bool = False
    offset: int = 0
    limit: int = 0
    """0: ``PEERS_A_PAGE``."""


PEER_ORDERS: Final = ("joined", "name", "behind", "lag", "seen", "clock", "leases", "state")
"""Orders of peers: the first two ascend, the others begin with the largest. By state, the silent ones come
first and those that left last, each as they joined."""

PEERS_A_PAGE: Final = 200
MOST_PEERS_A_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class PeerCount:
    """How many peers of a role are in a state."""

    role: Role
    state: str
    peers: int


@dataclass(frozen=True, slots=True)
class Headline:
    """The state of the run in a line; fields as in membership.proto."""

    doing: str
    waits_for: str
    """Empty: nothing, it moves."""
    for_s: float
    """Since it began to wait, or since the newest version where it moves."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A link of the chain of who waits for whom."""

    who: str
    waits_for: str
    for_s: float
    remedy: str
    """An action that ends it; empty: the next link has it, or none is known."""


@dataclass(frozen=True, slots=True)
class StatusLine:
    """A line of the state of the run, for people."""

    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class Unusual:
    """Something about some peers that is not as it should be."""

    what: str
    peers: int
    """How many it is about."""
    node_ids: tuple[str, ...]
    """Some of them, the worst first."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of the whole run; every count comes from the ledger."""

    run_id: str
    head: PolicyVersion | None
    learner_epoch: int
    peers: tuple[PeerStatus, ...]
    slots: dict[str, int]
    verdicts: dict[str, int]
    step: StepReport | None
    capacity_groups: int
    capacity_bound: str
    now_s: float
    ledger_gap: str = ""
    """Steps that the learner has taken and the ledger lacks, for people; empty if none are known."""
    prompts: int = 0
    """Number of prompts of the task."""
    bad_prompts: tuple[BadPrompt, ...] = ()
    """The newest prompts that were abandoned and have not been answered since."""
    bad_prompts_total: int = 0
    evaluation: EvaluationStatus = NO_EVALUATIONS
    max_staleness_versions: int = 0
    teaching: Teaching | None = None
    batch_groups: int = 0
    bad_prompt_reasons: dict[str, int] = field(default_factory=dict)
    """How many bad prompts for which reason."""
    grader_digest: bytes = b""
    """As in ``RunSettings``."""
    grader_said_by: str = ""
    """Who says so, for people."""
    exportable_best: int | None = None
    """The best version as the learner has written it down; None: it has not, or is not there."""
    lines: tuple[StatusLine, ...] = ()
    """Lines that features tell besides."""
    matching_peers: int = 0
    """How many peers met the conditions; ``peers`` is a page of them."""
    peer_counts: tuple[PeerCount, ...] = ()
    headline: Headline | None = None
    bottleneck: Bottleneck | None = None
    """The bound of the pace; None: not known yet, or the run stands still."""
    unusual: tuple[Unusual, ...] = ()
    """The most urgent first."""
    waits: tuple[Wait, ...] = ()
    """Who waits for whom, the run first; empty: it moves."""
