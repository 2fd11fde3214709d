"""Outcomes of decisions, once they are on disk: counted, logged, and told to the samplers they concern."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeAlias

from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.findings import Checked
from node.coordinator.work.decisions.judged_groups import Judged
from node.coordinator.work.decisions.leasing import Expired, Released
from node.coordinator.work.decisions.step_history import Outcome
from node.coordinator.work.decisions.submitted_groups import Submitted
from node.coordinator.work.decisions.trust import Quarantine
from node.coordinator.work.slots.slot import SlotKind, SlotState, is_held_out
from node.system.clock import Clock, moment
from node.telemetry.lag import submission_lags
from node.values.evaluation import Evaluation
from node.values.groups.failure import BadPrompt
from node.values.groups.reward_finding import RewardCheck
from node.values.groups.rollout import GroupHeader, other_options
from node.values.groups.verdict import GroupVerdict, Verdict

logger = logging.getLogger(__name__)

Notify: TypeAlias = Callable[[str, GroupVerdict], None]
"""Reports to a sampler what became of its group."""


class Outcomes:
    """Follows a run's ledger; decides nothing."""

    def __init__(
        self, accounts: Accounts, *, notify: Notify, metrics: CoordinatorMetrics, clock: Clock
    ) -> None:
        self._accounts = accounts
        self._notify = notify
        self._metrics = metrics
        self._clock = clock
        for verdict, n in accounts.tallies.total().items():
            metrics.groups.labels(verdict).inc(n)

    def follow(self, ledger: RunLedger) -> None:
        """Hear of every answer that is on disk."""
        ledger.when(Transaction, self._changed)
        ledger.when(Submitted, self._submitted)
        ledger.when(Released, self._released)
        ledger.when(Expired, self._expired)
        ledger.when(Judged, self._judged)
        ledger.when(Outcome, self._stepped)
        ledger.when(Checked, self._checked)
        ledger.when(Quarantine, self._quarantined)

    def _changed(self, transaction: Transaction) -> None:
        for evaluation in transaction.of(Evaluation):
            what = "version evaluated" if evaluation.finished_at_s else "evaluation begins"
            logger.info(what, extra=asdict(evaluation))
        bad = {entry.slot: entry for entry in transaction.of(BadPrompt)}
        for slot in transaction.slots:
            if slot.state is not SlotState.ABANDONED or (reason := slot.last_failure) is None:
                continue
            about = {"prompt_index": slot.prompt_index, "slot": slot.number, "reason": reason}
            if slot.kind is SlotKind.HELD_OUT:
                logger.warning("held-out prompt not answered", extra=about)
            else:
                self._metrics.abandoned_prompts.labels(reason).inc()
                why = asdict(bad[slot.number]) if slot.number in bad else {}
                logger.warning("prompt abandoned", extra={**about, **why})

    def _submitted(self, submitted: Submitted) -> None:
        assert submitted.submission is not None
        encoded, header = submitted.submission.encoded, submitted.submission.header
        is_for_training = not is_held_out(encoded.group_id)
        groups = self._metrics.groups if is_for_training else self._metrics.evaluation_groups
        groups.labels(submitted.verdict).inc()
        if isinstance(header, GroupHeader):
            self._count_misgraded(header)
            if submitted.verdict is Verdict.SPOOLED and is_for_training:
                self._observe_lags(encoded.sampler_id, header)
        if submitted.verdict not in (Verdict.SPOOLED, Verdict.DUPLICATE):
            logger.warning(
                "group refused",
                extra={
                    "sampler": encoded.sampler_id,
                    "verdict": submitted.verdict,
                    "detail": submitted.detail,
                },
            )

    def _count_misgraded(self, group: GroupHeader) -> None:
        if other_options(group, self._accounts.work.task_digest):
            self._metrics.misgraded_groups.labels("task options").inc()
        elif self._accounts.work.objection_to_grader(group.grader_digest):
            self._metrics.misgraded_groups.labels("grader code").inc()

    def _observe_lags(self, sampler_id: str, group: GroupHeader) -> None:
        now = self._clock.now()
        lags = submission_lags(group, spooled_at_s=now)
        if not lags:
            logger.warning(
                "timestamps of a group are far from this clock",
                extra={
                    "sampler": sampler_id,
                    "group_id": group.group_id,
                    "sampling_started": moment(group.sampling_started_at_s),
                    "graded": moment(group.graded_at_s),
                    "now": moment(now),
                    "note": "its lag is not shown; set the sampler's clock, or this one",
                },
            )
        if self._accounts.work.verifiers_grade:
            lags.pop("graded", None)
        for stage, lag_s in lags.items():
            self._metrics.observe_lag(stage, lag_s)

    def _released(self, released: Released) -> None:
        for fault in released.faults:
            self._metrics.prompt_faults.labels(fault).inc()

    def _expired(self, expired: Expired) -> None:
        if expired.leases:
            self._metrics.lease_expiries.inc(expired.leases)
            logger.info("leases expired", extra={"leases": expired.leases})

    def _judged(self, judged: Judged) -> None:
        assert judged.verdict is not None
        verdict, group_id = judged.verdict.verdict, judged.verdict.group_id
        self._metrics.groups.labels(verdict).inc()
        if verdict is Verdict.DUPLICATE:
            self._metrics.doubled_deliveries.inc()
            logger.error("learner had trained on a group before", extra={"group_id": group_id})
        if judged.spooled_at_s is not None:
            self._metrics.observe_lag("delivered", self._clock.now() - judged.spooled_at_s)
        self._notify(judged.sampler_id, judged.verdict)

    def _stepped(self, outcome: Outcome) -> None:
        self._metrics.double_trainings.inc(len(outcome.doubled))
        self._metrics.unknown_trainings.inc(len(outcome.unknown))
        if outcome.refusal is not None:
            named = (*outcome.doubled, *outcome.unknown)
            logger.error(
                "step trained on settled groups" if outcome.doubled else "ledger is behind the learner",
                extra={"detail": str(outcome.refusal), "groups": len(named), "first": next(iter(named), "")},
            )
            return
        for record in outcome.recorded:
            logger.info("step recorded", extra={"version": record.version, "groups": len(record.group_ids)})
        if lost := outcome.accepted_loss:
            extra = {"first": lost[0], "last": lost[-1]}
            logger.error("steps lost with an older ledger, as accepted", extra=extra)
        now = self._clock.now()
        for trained in outcome.trained:
            self._metrics.groups.labels(Verdict.TRAINED).inc()
            self._metrics.staleness.observe(trained.staleness_versions)
            if trained.spooled_at_s is not None:
                self._metrics.observe_lag("trained", now - trained.spooled_at_s)
            self._notify(trained.sampler_id, GroupVerdict(trained.group_id, Verdict.TRAINED))

    def _checked(self, checked: Checked) -> None:
        held, finding = checked.found.held, checked.found.finding
        self._metrics.reward_checks.labels(finding.outcome).inc()
        if finding.outcome not in (RewardCheck.AGREED, RewardCheck.GRADED):
            about = {"sampler": held.sampler_id, "group_id": held.group_id, "detail": finding.detail}
            logger.warning("rewards not confirmed", extra={"outcome": finding.outcome, **about})
        for verdict in checked.thrown_out:
            self._metrics.groups.labels(verdict.verdict).inc()
            self._notify(held.sampler_id, verdict)
        if checked.proof:
            self._metrics.proven_liars.inc()
            self._metrics.thrown_out_groups.inc(len(checked.thrown_out))
            logger.error(
                "sampler lies about rewards; it is shut out, and what it made is sampled again",
                extra={
                    "sampler": held.sampler_id,
                    "reason": checked.proof,
                    "groups": len(checked.thrown_out),
                    "fix": "look at its machine; `heterorl-node pardon` lets it in again, `revoke` never",
                },
            )

    def _quarantined(self, told: Quarantine) -> None:
        logger.warning(
            "sampler quarantined" if told.reason else "sampler released from quarantine",
            extra={"sampler": told.sampler_id, "reason": told.reason},
        )
