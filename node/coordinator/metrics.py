"""Metrics of the coordinator: verdicts, slots, lag, peers, the ledger."""

import math
from typing import Final

from prometheus_client import CollectorRegistry

from node.coordinator.fleet.held_back import CAUSES
from node.coordinator.fleet.survey import FleetSurvey
from node.coordinator.state_collectors import (
    BackupCollector,
    EvaluationCollector,
    PeerCollector,
    StepCollector,
)
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.capacity import capacities
from node.telemetry.metric_factory import MetricFactory
from node.values.bottleneck import Bottleneck
from node.values.groups.failure import FAULTS, Failure
from node.values.groups.reward_finding import RewardCheck
from node.values.groups.verdict import Verdict
from node.values.run import StepReport, Teaching

_STALENESS_BUCKETS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_LAG_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 150, 300, 600, 1800, 3600)
_TRANSACTION_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


class CoordinatorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        new = MetricFactory(registry, "coordinator")
        self._make_of_groups(new)
        self._make_of_ledger(new)
        self._make_of_fleet(new)
        self._make_of_checks(new)
        self._peers, self.evaluations = PeerCollector(), EvaluationCollector()
        self._steps = StepCollector()
        self.backups = BackupCollector()
        registry.register(self._peers)
        registry.register(self._steps)
        registry.register(self.evaluations)
        registry.register(self.backups)

    def _make_of_groups(self, new: MetricFactory) -> None:
        self.groups = new.counter(
            "groups", "Verdicts given, from the ledger; since the start also repeats and strays.", "verdict"
        )
        self._slots = new.gauge("slots", "Prompt slots by state, from the ledger.", "state")
        self.max_staleness_versions = new.gauge(
            "max_staleness_versions", "The staleness bound, as configured, for alerts to compare with."
        )
        self._capacity = new.gauge("capacity_groups", "Groups that may be leased under each bound.", "bound")
        self._spooled_bytes = new.gauge("spooled_bytes", "Groups on disk that wait for training.")
        self.staleness = new.histogram(
            "group_staleness_versions",
            "Staleness of groups when they were trained on.",
            buckets=_STALENESS_BUCKETS,
        )
        self._stage = new.histogram(
            "group_lag_seconds", "Time groups took per stage.", "stage", buckets=_LAG_BUCKETS_S
        )
        self.prompt_faults = new.counter(
            "prompt_faults",
            "Leases given back because their prompts could not be answered, by reason.",
            "reason",
        )
        self.abandoned_prompts = new.counter(
            "abandoned_prompts", "Slots given up, by the reason of their last attempt.", "reason"
        )
        self.lease_expiries = new.counter("lease_expiries", "Leases that ended without a group.")
        self.double_trainings = new.counter(
            "double_trainings", "Groups a step named although their slot was settled before."
        )
        self.unknown_trainings = new.counter(
            "unknown_trainings", "Groups the learner named that were never submitted here."
        )
        self.doubled_deliveries = new.counter(
            "doubled_deliveries", "Groups delivered that the learner had trained on before."
        )
        for verdict in Verdict:
            self.groups.labels(verdict)
        for fault in FAULTS:
            self.prompt_faults.labels(fault)
        for reason in Failure:
            self.abandoned_prompts.labels(reason)

    def _make_of_ledger(self, new: MetricFactory) -> None:
        self.transaction = new.histogram(
            "ledger_transaction_seconds",
            "Time until a commit of the transactions that waited for it was on disk.",
            buckets=_TRANSACTION_BUCKETS_S,
        )
        self.transactions = new.counter("ledger_transactions", "Transactions on disk; many share a commit.")
        self.undone_batches = new.counter(
            "undone_batches",
            "Failed commits of several transactions, after which the coordinator went back to its ledger.",
        )
        self.waiting_requests = new.gauge(
            "waiting_requests", "Requests that wait for their turn to be decided and written to the ledger."
        )
        self.dropped_decisions = new.counter(
            "dropped_decisions",
            "Requests that were not decided: their callers had gone, or were told to come back, because too "
            "many waited (full), they had waited too long (late) or the coordinator stopped (draining).",
            "cause",
        )
        self._ledger_confirmed = new.gauge(
            "ledger_confirmed", "1 once the learner has found nothing missing in the ledger; until then 0."
        )
        self._ledger_behind = new.gauge(
            "ledger_behind", "1 while the learner knows of steps or groups that the ledger lacks."
        )
        self.damaged_groups = new.counter(
            "damaged_groups", "Groups in the spool whose bytes are not those that were stored."
        )
        for cause in ("gone", "full", "late", "draining"):
            self.dropped_decisions.labels(cause)

    def _make_of_fleet(self, new: MetricFactory) -> None:
        self.leads = new.gauge("leads", "1 where this coordinator serves the run; 0 where it stands by.")
        self.paused = new.gauge("paused", "1 while an operator has paused the run.")
        self.drained = new.gauge("drained_samplers", "Samplers that operators have drained.")
        self.head = new.gauge("head_version", "The newest announced policy version.")
        self.heartbeat_pause = new.gauge(
            "heartbeat_pause_seconds", "Mean time between two heartbeats of a sampler, as samplers are told."
        )
        self._learner_version = new.gauge(
            "learner_version", "The newest version the learner is known to have reached."
        )
        self.dropped_verdicts = new.counter(
            "dropped_verdicts",
            "Verdicts their samplers were never told, because they had stopped sending heartbeats.",
        )
        self.refused_twins = new.counter(
            "refused_twins", "Times a process was refused because another of its name was in the run."
        )
        self._bottleneck = new.gauge(
            "bottleneck", "1 for what bounds the pace of the run; 0 for all while it is not known.",
            "by", "setting",
        )  # fmt: skip
        self._learner_wait = new.gauge(
            "learner_wait_ratio",
            "Share of the learner's time that it waited for groups; as of the bottleneck.",
        )
        self._held_back = new.gauge(
            "samplers_held_back_ratio",
            "Share of the samplers' time that limits, graders and transfers held them back.",
        )
        self.show_pace(None)

    def _make_of_checks(self, new: MetricFactory) -> None:
        self._grader_digests = new.gauge("grader_digests", "Different grader codes of the samplers present.")
        self.misgraded_groups = new.counter(
            "misgraded_groups",
            "Groups refused because of what graded them: task options or grader code.",
            "what",
        )
        self.evaluation_groups = new.counter(
            "evaluation_groups", "Groups of held-out prompts submitted; spooled ones count.", "verdict"
        )
        self.verifiers = new.gauge(
            "verifiers", "Verifiers that check rewards; without one rewards are believed."
        )
        self.reward_checks = new.counter(
            "reward_checks",
            "Groups drawn for a check of their rewards, or to be graded, by outcome: a verifier's finding; "
            "that it is slow while others' are answered for (late), and they wait; or that no verifier "
            "answered or too many waited (passed over), and they are delivered and checked afterwards, or "
            "never, for want of room.",
            "outcome",
        )
        self.owed_checks = new.gauge(
            "owed_checks_groups", "Groups that were delivered unchecked and are to be checked afterwards."
        )
        self.thinly_checked = new.gauge(
            "thinly_checked_samplers",
            "Samplers of whose latest groups less than half of those drawn for a check were checked.",
        )
        self._waiting_newcomers = new.gauge(
            "newcomers_waiting_groups",
            "Groups that wait because newcomers fill their part of the batches (coordinator.newcomers_part).",
        )
        self.proven_liars = new.counter(
            "proven_liars", "Samplers that verifiers proved to lie about rewards."
        )
        self.thrown_out_groups = new.counter(
            "thrown_out_groups", "Groups of proven liars that were not yet trained on, and are sampled again."
        )
        for verdict in Verdict:
            self.evaluation_groups.labels(verdict)
        for outcome in (*RewardCheck, "late", "passed over", "never"):
            self.reward_checks.labels(outcome)

    def observe_lag(self, stage: str, seconds: float) -> None:
        """Observe how long a group took; stages as in ``node.telemetry.lag``."""
        self._stage.labels(stage).observe(max(0.0, seconds))

    def show(self, accounts: Accounts) -> None:
        """Show what is in flight, whether the ledger is known to be whole, and how versions do."""
        load = accounts.load()
        for state, n in accounts.slots.counts().items():
            self._slots.labels(state).set(n)
        for bound, n in capacities(accounts.bounds, load).items():
            self._capacity.labels(bound).set(max(0, n))
        self._learner_version.set(load.version)
        self._spooled_bytes.set(load.untrained_bytes)
        self._waiting_newcomers.set(accounts.waiting_newcomers())
        self._ledger_confirmed.set(accounts.is_confirmed)
        self._ledger_behind.set(bool(accounts.gap))
        self.evaluations.status = accounts.evaluations.status

    def show_steps(self, step: StepReport | None, teaching: Teaching | None) -> None:
        """Show what the learner reports of its newest step and batches."""
        self._steps.step, self._steps.teaching = step, teaching

    def show_pace(self, bottleneck: Bottleneck | None) -> None:
        """Show what bounds the pace; None: it is not known."""
        known = None if bottleneck is None else (bottleneck.by, bottleneck.setting)
        for answer in {(cause.by.value, cause.setting) for cause in CAUSES}:
            self._bottleneck.labels(*answer).set(answer == known)
        self._learner_wait.set(math.nan if bottleneck is None else bottleneck.learner_wait_ratio)
        self._held_back.set(math.nan if bottleneck is None else bottleneck.held_back_ratio)

    def show_fleet(self, survey: FleetSurvey) -> None:
        """Show what a look at all peers found; peers that are not in it any more disappear."""
        self._peers.survey = survey
        self._grader_digests.set(survey.grader_codes)
