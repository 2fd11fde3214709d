"""Reads, judges and admits groups, and makes batches of them; tells and counts each refusal.

    drain --bytes--> buffer --> of a quarantined sampler: refused unread
                        '-----> training thread: decoded, judged, compared with others --> admitted --> batch
                                                                 '-- refused                  '-- evicted

Decoding and judging a large group would hold heartbeats up on the event loop: the training thread does it,
between two steps.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

from learner.intake.batch_buffer import BatchBuffer
from learner.intake.copies import Copies
from learner.intake.group_verdict import GroupRules, judge
from learner.metrics import LearnerMetrics
from learner.training.coordinator import Coordinator
from learner.training.evidence import Evidence
from learner.training.training_state import TrainingState
from learner.training.work_thread import WorkThread
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.errors import RefusedError, StartupError
from node.telemetry.lag import believed_lag_s
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.run import RunSettings
from node.wire.rollouts import group_from_wire

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Judged:
    """An arrived group once the training thread has looked at it."""

    encoded: EncodedGroup
    verdict: GroupVerdict
    group: RolloutGroup | None = None
    """None: it could not be decoded."""
    is_of_copier: bool = False
    """Whether its sampler is to be quarantined for copies, of which this is one."""


def group_rules(
    run: RunSettings,
    state: TrainingState,
    coordinator: Coordinator,
    *,
    was_skipped: Callable[[int], bool],
) -> GroupRules:
    """Return what groups of the run are judged by.

    Raises:
        StartupError: this learner's buffer is too small for the run's batches.
    """
    if state.config.buffer_groups < run.batch_groups:
        raise StartupError(
            f"learner.buffer_groups = {state.config.buffer_groups} never fills a batch of "
            f"{run.batch_groups} groups",
            fix=f"Set learner.buffer_groups to {run.batch_groups} or more",
        )
    policy = state.policy
    return GroupRules(
        run_id=coordinator.run_id,
        layout_digest=policy.layout.digest,
        tokenizer_digest=coordinator.tokenizer_digest,
        vocabulary_size=policy.vocabulary_size,
        context_tokens=policy.scorer.context_tokens,
        objection=policy.scorer.objection,
        was_skipped=was_skipped,
        group_size=run.group_size,
        max_staleness_versions=run.max_staleness_versions,
    )


class GroupIntake:
    """Judges what arrives in a buffer, for the event loop's thread."""

    def __init__(
        self,
        buffer: BatchBuffer,
        rules: GroupRules,
        *,
        state: TrainingState,
        drain: RolloutDrain,
        evidence: Evidence,
        thread: WorkThread,
        now: Callable[[], float],
        metrics: LearnerMetrics,
    ) -> None:
        """Judge by ``rules``.

        Args:
            thread: that of ``state``, in which groups are read.
            now: returns Unix seconds on the coordinator's clock, which stamps groups.
        """
        self._buffer = buffer
        self._rules = rules
        self._state = state
        self._drain = drain
        self._evidence = evidence
        self._thread = thread
        self._now = now
        self._metrics = metrics
        self._copies = Copies()
        """The training thread's."""
        self._quarantined_before: frozenset[str] = frozenset()

    async def admit(self) -> list[RolloutGroup]:
        """Judge all groups that have arrived; return those that were admitted."""
        to_read = [group for group in self._buffer.arrived if not self._refuse_quarantined(group)]
        if not to_read:
            return []
        judged = await self._thread.do(lambda: [self._judged(group) for group in to_read])
        admitted = [taught for one in judged if (taught := self._settle(one)) is not None]
        self._metrics.buffered_groups.set(len(self._buffer))
        return admitted

    def next_batch(
        self,
        groups: int,
        *,
        task_digest: bytes | None,
        is_wanted: Callable[[str], bool] = lambda _: True,
    ) -> tuple[RolloutGroup, ...]:
        """Evict what cannot be trained on any more, and take a batch of so many groups; () if it is not full.

        Args:
            task_digest: of the options that groups must be graded by; None: not told.
            is_wanted: whether a group, by its id, may be in the batch.
        """
        quarantined = self._drain.quarantined
        # Of those quarantined before there are only probes, which are to be trained on.
        newly = {name: why for name, why in quarantined.items() if name not in self._quarantined_before}
        self._quarantined_before = frozenset(quarantined)
        evicted = self._buffer.evict(
            version=self._state.version,
            max_staleness_versions=self._rules.max_staleness_versions,
            task_digest=task_digest,
            shut_out=newly,
            trained_group_ids=self._state.trained_slots,
            since_version=self._state.progress.oldest_usable_version,
        )
        for group, verdict in evicted:
            self.report(verdict, group.sampler_id)
        batch = self._buffer.take_batch(groups, is_wanted=is_wanted)
        self._metrics.buffered_groups.set(len(self._buffer))
        return batch

    def report(self, verdict: GroupVerdict, sampler_id: str) -> None:
        """Tell and count what became of a sampler's group."""
        self._metrics.groups.labels(verdict.verdict).inc()
        self._drain.judge(verdict)
        if verdict.verdict is Verdict.DUPLICATE:
            self._metrics.doubled_groups.inc()
        if verdict.verdict not in (Verdict.ACCEPTED, Verdict.UNINFORMATIVE):
            logger.warning("group refused", extra={**asdict(verdict), "sampler": sampler_id})

    def observe_lags(self, **since_s: float) -> None:
        """Observe how long ago the moments were from which stages count, on the coordinator's clock."""
        for stage, since in since_s.items():
            lag_s = believed_lag_s(since, now=self._now())
            if lag_s is not None:
                self._metrics.lag_seconds.labels(stage).observe(lag_s)

    def _refuse_quarantined(self, group: EncodedGroup) -> bool:
        """Refuse a group of a quarantined sampler, unless it is a probe; return whether it was refused."""
        name, why = group.sampler_id, self._drain.quarantined.get(group.sampler_id)
        if why is None or self._evidence.mismatches.takes_probe(name, now=self._now()):
            return False
        what = (
            f"{name} is quarantined: {why}. Correct its engine or sampling: a group is measured every few "
            "minutes, and it is released once they fit, or by `heterorl-node pardon`"
        )
        self._settle(_Judged(group, GroupVerdict(group.group_id, Verdict.SUSPECT, what)))
        return True

    def _judged(self, encoded: EncodedGroup) -> _Judged:
        """Decode and judge a group. In the training thread."""
        try:
            group = group_from_wire(encoded)
        except RefusedError as refused:
            return _Judged(encoded, GroupVerdict(encoded.group_id, Verdict.MALFORMED, str(refused)))
        verdict = judge(
            group,
            self._rules,
            version=self._state.version,
            trained_group_ids=self._state.trained_slots,
            since_version=self._state.progress.oldest_usable_version,
        )
        if verdict.verdict is Verdict.ACCEPTED and (copied := self._copies.add(group)):
            verdict = GroupVerdict(group.group_id, Verdict.SUSPECT, copied)
            if self._copies.is_copier(group.sampler_id):
                self._copies.forgive(group.sampler_id)
                return _Judged(encoded, verdict, group, is_of_copier=True)
        return _Judged(encoded, verdict, group)

    def _settle(self, judged: _Judged) -> RolloutGroup | None:
        """Admit or refuse a group as it was judged; return what is admitted."""
        encoded, verdict = judged.encoded, judged.verdict
        self.observe_lags(delivered=encoded.spooled_at_s)
        taught = None
        if judged.group is not None and verdict.verdict is Verdict.ACCEPTED:
            taught = judged.group.without_abstained()
            self._buffer.admit(taught)
        else:
            self._buffer.refuse(encoded.group_id)
        if judged.is_of_copier:
            self._drain.quarantine(encoded.sampler_id, f"its groups are copies: {verdict.detail}")
        self.report(verdict, encoded.sampler_id)
        return taught
