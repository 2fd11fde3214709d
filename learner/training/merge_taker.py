"""Decides what a learner that merges does next, between two merges: deal, look at contributions, merge.

    batch --dealt--> contributor --contribution--> looked at --its round is due--> merged --> step_records
      ^                                   '--refused: its groups are dealt again
      '-- given back: its contributor is gone, or has started again

A group is told of once the version that its contribution made is in the journal.
"""

import json
import logging
from dataclasses import replace
from functools import partial

from learner.intake.batch_buffer import BatchBuffer
from learner.merging.changes.coder import change_limit_bytes
from learner.merging.contributor_streams import ContributorStreams
from learner.merging.deals import DealRules, Deals
from learner.merging.formulas.stability import GrowthAlarm
from learner.merging.handed_in import HandedIn, report_objection
from learner.merging.outer_optimizer import norm_of_change
from learner.merging.rounds import Added, Rounds, Unfit
from learner.metrics import Instruments
from learner.step_settings import StepSettings
from learner.training.coordinator import Coordinator
from learner.training.group_intake import GroupIntake
from learner.training.step_records import StepRecords
from learner.training.training_state import TrainingState
from learner.training.work_thread import WorkThread
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.errors import StartupError
from node.values.contribution import MergeTerms
from node.values.groups.rollout import RolloutGroup
from node.values.run import RunSettings
from node.wire.rollouts import source_of

logger = logging.getLogger(__name__)


class MergeTaker:
    """Called from the training loop's turns; nothing else reads or moves groups and contributions."""

    def __init__(
        self,
        state: TrainingState,
        records: StepRecords,
        streams: ContributorStreams,
        run: RunSettings,
        *,
        coordinator: Coordinator,
        buffer: BatchBuffer,
        intake: GroupIntake,
        drain: RolloutDrain,
        thread: WorkThread,
        instruments: Instruments,
    ) -> None:
        """Take contributors in at ``streams`` from now on.

        Raises:
            StartupError: the buffer is too small for one contribution.
        """
        config = state.config.merge
        assert config is not None
        self._state, self._records, self._streams = state, records, streams
        self._coordinator, self._buffer, self._intake = coordinator, buffer, intake
        self._drain, self._thread, self._clock = drain, thread, instruments.clock
        self._metrics = instruments.metrics.merging
        self._settings = config.of_merge
        self._batch_groups = run.batch_groups
        self._capacity_groups = state.config.buffer_groups
        rules = DealRules(
            run.batch_groups,
            config.local_steps,
            self._capacity_groups,
            member_timeout_s=config.member_timeout_s,
            restart_wait_s=config.restart_wait_s,
        )
        if rules.most_contributors == 0:
            raise StartupError(
                f"learner.buffer_groups = {self._capacity_groups} never fills a contribution of "
                f"{config.local_steps} steps of {run.batch_groups} groups",
                fix=f"Set learner.buffer_groups to {rules.hand_groups} times the number of contributors, or "
                "learner.merge.local_steps lower",
            )
        now = self._clock.monotonic()
        self._deals, self._rounds = Deals(rules, now=now), Rounds(self._settings, now=now)
        self._growth = GrowthAlarm()
        shapes = {name: one.shape for name, one in state.policy.parameters.items()}
        self._norm_of = partial(norm_of_change, settings=self._settings, shapes=shapes)
        streams.begin(
            self._deals,
            self._terms(),
            was_trained=lambda group_id: group_id in state.trained_slots,
            merged=state.progress.contributed,
            payload_limit=change_limit_bytes(self._settings, shapes),
        )

    @property
    def waits_for(self) -> str:
        """Name of the wait for the next merge."""
        if not self._deals.contributors:
            return "contributors"
        return "contributions" if self._deals.waited_for(has_room=True) else "rollout groups"

    @property
    def pause_s(self) -> float:
        """How long nothing happens unless something comes; at most a second, for gauges of ages."""
        now = self._clock.monotonic()
        times = (self._deals.next_event_s(now=now), self._rounds.next_event_s)
        return min((max(0.0, at - now) for at in times if at is not None), default=1.0)

    async def advance(self) -> bool:
        """Do all that is due; return whether a version was made.

        Raises:
            TrainingError: as ``TrainingState.take_merge``.
        """
        now = self._clock.monotonic()
        self._streams.change_terms(self._terms())
        returned, self._streams.returned = self._streams.returned, []
        self._buffer.put_back([*returned, *self._deals.expire(now=now)])
        for group in self._buffer.take_if(self._deals.is_claimed):
            self._deals.found(group)
        self._deal()
        await self._look_at_contributions()
        for name, why in self._unfit().items():
            self._refuse(self._streams.waiting[name], why.detail, outcome=why.outcome)
        self._metrics.round_seconds.set(self._rounds.age_s(now=now))
        self._metrics.dealt_groups.set(self._deals.held_groups)
        held = self._deals.held_groups + len(self._buffer)
        waited_for = self._deals.waited_for(has_room=held < self._capacity_groups)
        names = self._rounds.due(waited_for, now=self._clock.monotonic())
        return bool(names) and await self._merge([self._streams.waiting[name] for name in names])

    def _deal(self) -> None:
        while (name := self._deals.taker(now=self._clock.monotonic())) is not None:
            batch = self._intake.next_batch(self._batch_groups, task_digest=self._coordinator.task_digest)
            if not batch:
                return
            self._deals.deal(name, batch)
            self._streams.deal(name, map(source_of, batch))
            ids = [group.group_id for group in batch]
            logger.debug("batch dealt", extra={"contributor": name, "group_ids": ids})

    async def _look_at_contributions(self) -> None:
        for name, one in list(self._streams.inbox.items()):
            if self._deals.awaits(name, one.group_ids):
                continue  # the coordinator delivers its groups again
            del self._streams.inbox[name]
            why = self._deals.objection(name, one.group_ids)
            if why:
                self._refuse(one, why, outcome="groups", takes_all=True)
                continue
            groups = self._deals.hand_in(name, one.group_ids)
            self._streams.waiting[name] = one
            try:
                if why := report_objection(one, groups, version=self._state.version):
                    raise ValueError(why)
                words = self._state.trainer.words_before
                norm_of = partial(self._norm_of, one.payload, words_before=words)
                norm = await self._thread.do(norm_of) if one.payload else 0.0
            except ValueError as error:
                self._refuse(one, str(error), outcome="broken", takes_all=True)
                continue
            self._metrics.change_norm.labels(name).set(norm)
            self._rounds.add(Added(name, one.base_version, norm))

    def _unfit(self) -> dict[str, Unfit]:
        """Return the contributions that can no longer be merged, and why."""
        unfit = self._rounds.refusals(version=self._state.version)
        for name, one in self._streams.waiting.items():
            if one.base_version < self._state.progress.oldest_usable_version:
                why = f"its steps began from version {one.base_version}, which was rolled back"
                unfit[name] = Unfit("late", why)
        return unfit

    def _refuse(self, one: HandedIn, why: str, *, outcome: str, takes_all: bool = False) -> None:
        """Tell a contributor why its contribution is not merged; deal its groups again.

        Args:
            takes_all: whether it loses all that it holds, too, because it does not say what is so.
        """
        if one.contributor in self._rounds:
            self._rounds.remove(one.contributor)
        others = self._deals.held_by(one.contributor) - set(one.group_ids) if takes_all else set[str]()
        self._buffer.put_back(self._deals.give_back(one.contributor, [*one.group_ids, *sorted(others)]))
        self._streams.refuse(one.contributor, one.number, why, taken=sorted(others))
        self._metrics.contributions.labels(outcome).inc()
        about = {"contributor": one.contributor, "number": one.number, "detail": why}
        logger.warning("contribution refused", extra=about)

    async def _merge(self, handed_in: list[HandedIn]) -> bool:
        """Make a version of contributions whose round is due; False if none of them taught anything."""
        groups: dict[str, RolloutGroup] = {}
        for one in handed_in:
            groups |= self._deals.handed_in(one.contributor)
        is_version = any(one.report.steps for one in handed_in)
        if is_version:
            unacknowledged, wait_s = self._drain.unacknowledged, self._records.groups_wait_s
            taken = await self._thread.do(
                lambda: self._state.take_merge(
                    handed_in, groups, unacknowledged=unacknowledged, groups_wait_s=wait_s
                )
            )
            trained = [groups[one.group_id] for one in taken.line.groups]
            if not await self._records.keep(taken, trained):
                return False
        self._end_round(handed_in, groups)
        if is_version:
            self._show(self._state.merged_norm)
        return is_version

    def _show(self, norm: float) -> None:
        """Show a merge that is durable."""
        grows = self._growth.observe(norm)
        self._metrics.outer_rate.set(self._settings.outer_rate)
        self._metrics.merged_norm.set(norm)
        self._metrics.diverges.set(grows)
        if grows:
            logger.error("merged changes grow as in divergence", extra={"norm": norm})

    def _end_round(self, handed_in: list[HandedIn], groups: dict[str, RolloutGroup]) -> None:
        """Answer contributors, and tell what became of groups that moved nothing."""
        taught_nothing = [groups[g.group_id] for one in handed_in for g in one.report.uninformative]
        not_finite = [groups[g.group_id] for one in handed_in for g in one.report.not_finite]
        self._records.consume(taught_nothing)
        self._records.refuse(not_finite)
        for one in handed_in:
            self._deals.consumed(one.contributor, one.group_ids)
            merged = replace(one.contributed, version=self._state.version)
            self._streams.answer(one.contributor, merged)
            self._metrics.contributions.labels("merged" if one.report.steps else "empty").inc()
        self._rounds.merged([one.contributor for one in handed_in], now=self._clock.monotonic())

    def _terms(self) -> MergeTerms:
        step = StepSettings.of(self._state.config).model_dump()
        return MergeTerms(
            step_settings=json.dumps(step).encode(),
            merge_settings=json.dumps(self._settings.model_dump()).encode(),
            batch_groups=self._batch_groups,
        )
