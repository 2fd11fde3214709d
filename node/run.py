"""A run as values: roles, settings, steps, status."""

import enum
from dataclasses import dataclass

from node.failure import BadPrompt
from node.policy import PolicyVersion
from node.rollout import SamplingParameters


class Role(enum.StrEnum):
    """The role of a peer, which decides what it may do."""

    COORDINATOR = "coordinator"
    LEARNER = "learner"
    SAMPLER = "sampler"
    RELAY = "relay"
    OPERATOR = "operator"


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


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The groups a step consumed, and how stale each was."""

    version: int
    group_ids: tuple[str, ...]
    staleness_versions: tuple[int, ...]


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
    """Number of prompts of the task; 0 until a peer has reported it."""
    bad_prompts: tuple[BadPrompt, ...] = ()
    """The newest prompts that were abandoned and have not been answered since."""
    bad_prompts_total: int = 0
