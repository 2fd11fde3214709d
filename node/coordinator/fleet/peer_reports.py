"""Reports of peers when they join and with each heartbeat, and the answers; values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from node.coordinator.work.terms.model_check import Learner, SamplerModel, VerifierModel
from node.values.groups.verdict import GroupVerdict
from node.values.peer_figures import MachineFigures, SamplerFigures, reported
from node.values.policy import PolicyVersion
from node.values.protocol import OURS, Spoken
from node.values.run import StepReport, Teaching


@dataclass(frozen=True, slots=True)
class Joining:
    """A request to join."""

    held: PolicyVersion | None
    model: Learner | SamplerModel | VerifierModel | None = None
    """None: a relay has none."""
    instance: str = ""
    prompts: int = 0
    """Prompts that a sampler found in the run's task; 0: it does not know yet, or the coordinator has the
    rows."""
    completes: bool = False
    """Whether it reports what it could not before it knew the run's settings."""
    grader_digest: bytes = b""
    speaks: Spoken = OURS


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """The part of a heartbeat that learners alone send."""

    step: StepReport | None = None
    """None, as of the next one: as it said before."""
    teaching: Teaching | None = None
    best_version: int | None = None
    """As written down for ``export --best``; None: no version is."""
    changes: tuple[str, ...] = ()
    """Texts of what an operator has changed lately, newest first."""
    version_groups: int = 0
    """Groups that the next version is made of; 0: a batch."""


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    held: PolicyVersion | None
    clock_offset_s: float = 0.0
    waits_for: str = ""
    has_heard: bool = False
    """Whether the answer before arrived: a peer writes the next heartbeat of a stream only then."""
    instance: str = ""
    machine: MachineFigures | None = None
    """None, as of the next one: as it said before."""
    sampler: SamplerFigures | None = None
    learner: LearnerReport | None = None
    """None: it is no learner."""


@dataclass(frozen=True, slots=True)
class LearnerNews:
    """The part of an answer that learners alone get."""

    longest_lag_versions: int
    """The furthest any sampler is behind."""
    best_version: int | None
    """On held-out prompts; None: no version has a score."""
    evaluating_version: int | None
    is_evaluated: bool


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    head: PolicyVersion | None
    verdicts: tuple[GroupVerdict, ...]
    must_repair: bool
    next_heartbeat_s: float | None
    """When the peer is to send its next heartbeat; None: after the configured interval."""
    learner: LearnerNews | None = None


@dataclass(slots=True)
class Reported:
    """All that a peer has said of itself, the newest word each; only ``Peers`` changes it."""

    report: HeartbeatReport
    """The newest."""
    waits_since_s: float
    """Since when it names the wait that it names now."""
    speaks: Spoken
    machine: MachineFigures | None = None
    sampler: SamplerFigures | None = None
    """The numbers that it reported last."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The ones of both that are known, by name."""
    grader: bytes = b""
    """Digest of its grader code; empty: it did not say."""
    unchecked: SamplerModel | VerifierModel | None = None
    """Its model, where the learner has not said yet what the run's is."""
    said_base: str | None = None
    """The instance that said which base model it has; None: none did."""

    def note(self, report: HeartbeatReport, now: float) -> None:
        """Take in a heartbeat. One of many brings numbers: they are taken apart here, not at each look."""
        if self.report.waits_for != report.waits_for:
            self.waits_since_s = now
        self.report = report
        if report.machine is not None or report.sampler is not None:
            self.machine = report.machine or self.machine
            self.sampler = report.sampler or self.sampler
            self.figures = dict(reported(self.machine, self.sampler))
