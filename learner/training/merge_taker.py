"""Decides what a learner that merges does next, between two merges: deal, look at contributions, merge.

    batch --dealt--> contributor --contribution--> looked at --its round is due--> merged --> step_records
      ^                                   '--refused: its groups are dealt again
      '-- given back: its contributor is gone, or has started again

A group is told of once the version that its contribution made is in the journal.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from learner.intake.batch_buffer import BatchBuffer
from learner.intake.trained_slots import doubled
from learner.merging.changes.coder import change_limit_bytes
from learner.merging.contributor_streams import ContributorStreams
from learner.merging.deals import Deals
from learner.merging.doubts import Doubts
from learner.merging.formulas.fragments import Fragments
from learner.merging.handed_in import HandedIn
from learner.merging.rounds import Added, Awaited, Rounds, Unfit
from learner.metrics import Instruments
from learner.training.contribution_check import check_contribution
from learner.training.coordinator import Coordinator
from learner.training.group_intake import GroupIntake
from learner.training.merge_rules import deal_rules, merge_terms
from learner.training.step_records import StepRecords
from learner.training.step_taken import taught_nothing
from learner.training.training_state import TrainingState
from learner.training.work_thread import WorkThread
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.errors import Reason, RefusedError
from node.serving.merge_servicer import MergeServicer
from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import Verdict
from node.values.run import RunSettings
from node.wire.rollouts import source_of

logger = logging.getLogger(__name__)


class MergeTaker:
    """Called from the training loop's turns; nothing else reads or moves groups and contributions."""

    def __init__(
        self,
        state: TrainingState,
        records: StepRecords,
        servicer: MergeServicer,
        run: RunSettings,
        *,
        coordinator: Coordinator,
        buffer: BatchBuffer,
        intake: GroupIntake,
        drain: RolloutDrain,
        thread: WorkThread,
        instruments: Instruments,
    ) -> None:
        """Take contributors in at ``servicer`` from now on.

        Raises:
            StartupError: the buffer is too small for one contribution.
        """
        config = state.config.merge
        assert config is not None
        self._state, self._records = state, records
        self._coordinator, self._buffer, self._intake = coordinator, buffer, intake
        self._drain, self._thread, self._clock = drain, thread, instruments.clock
        self._metrics = instruments.metrics.merging
        self._settings, self._rules = config.of_merge, deal_rules(state.config, run)
        self._revocations = servicer.revocations
        now = self._clock.monotonic()
        self._deals, self._rounds = Deals(self._rules, now=now), Rounds(self._settings, now=now)
        self._doubts = Doubts(most_groups=self._rules.capacity_groups)
        self._awaited = Awaited()
        shapes = {name: one.shape for name, one in state.policy.parameters.items()}
        self._show_rates()
        sizes = {name: one.numel() for name, one in state.policy.parameters.items()}
        self._fragments = Fragments.of(sizes, count=self._settings.fragments)
        self._handed_in: dict[str, HandedIn] = {}
        """By contributor: read, and without an answer."""
        self._streams = servicer.desk = ContributorStreams(
            self._deals,
            merge_terms(state.config, self._rules),
            was_trained=lambda group_id: group_id in state.trained_slots,
            merged=state.progress.contributed,
            payload_limit=change_limit_bytes(self._settings, shapes),
            wake=drain.wake,
            clock=self._clock,
            metrics=self._metrics,
        )

    @property
    def waits_for(self) -> tuple[str, str]:
        """Name of the wait for the next merge, and for whom."""
        if not self._deals.contributors:
            return "contributors", ""
        return ("contributions", self._awaited.text) if self._awaited.late else ("rollout groups", "")

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
        self._streams.change_terms(merge_terms(self._state.config, self._rules))
        returned, self._streams.returned = self._streams.returned, []
        self._buffer.put_back(returned)
        for group in self._buffer.take_if(self._deals.is_claimed):
            # Sent again: who has it ignores it, and who only claims it has no room for it, and must say so.
            self._streams.deal(self._deals.found(group), [source_of(group)])
        self._deal()
        await self._look_at_contributions()
        # Only now: what has come counts, however long its sender has been gone.
        if gone := self._deals.expire(now=now):
            self._buffer.put_back(gone)
            self._drain.wake()
        self._shut_out()
        for name, why in self._unfit().items():
            self._refuse(self._handed_in[name], why.detail, outcome=why.outcome)
        held = self._deals.held_groups + len(self._buffer)
        waited_for = self._deals.waited_for(has_room=held < self._rules.capacity_groups)
        self._awaited = Awaited.of(
            waited_for, here=self._handed_in.keys(), asking=self._deals.asking(now=now)
        )
        self._metrics.show_round(self._rounds.age_s(now=now), late=self._awaited.late)
        self._metrics.dealt_groups.set(self._deals.held_groups)
        names = self._rounds.due(waited_for, now=self._clock.monotonic())
        return bool(names) and await self._merge([self._handed_in[name] for name in names])

    def _deal(self) -> None:
        while any(self._deal_batch(name) for name in self._deals.takers(now=self._clock.monotonic())):
            pass

    def _deal_batch(self, name: str) -> bool:
        """Deal a batch to a contributor; return whether there was one for it."""
        batch = self._intake.next_batch(
            self._rules.batch_groups,
            task_digest=self._coordinator.task_digest,
            is_wanted=partial(self._doubts.may_have, name, present=self._deals.contributors),
        )
        if batch:
            self._deals.deal(name, batch)
            self._streams.deal(name, map(source_of, batch))
            ids = [group.group_id for group in batch]
            logger.debug("batch dealt", extra={"contributor": name, "group_ids": ids})
        return bool(batch)

    async def _look_at_contributions(self) -> None:
        for name, sent in list(self._streams.pending.items()):
            if name not in self._handed_in:
                try:
                    self._handed_in[name] = await self._thread.do(partial(HandedIn.of, name, sent))
                except ValueError as error:
                    why = f"contribution {sent.number}: {error}"
                    self._streams.end(name, RefusedError(Reason.MALFORMED, why))
                    continue
            one = self._handed_in[name]
            # Until the coordinator has delivered its groups again, after a restart, they are claimed.
            if name not in self._rounds and not self._deals.awaits(name, one.group_ids):
                await self._take_in(one)

    async def _take_in(self, one: HandedIn) -> None:
        name = one.contributor
        if why := self._deals.objection(name, one.group_ids):
            # Its sender does not say what is so: it loses all that it holds.
            self._refuse(one, why, outcome="groups", others=self._deals.held_by(name))
            return
        if passed_over := self._deals.passed_over(name, frozenset(one.group_ids)):
            self._buffer.put_back(self._deals.give_back(name, passed_over))
            self._streams.take_back(name, passed_over)
        groups = self._deals.hand_in(name, one.group_ids)
        one = one.counted(groups)
        check = partial(
            check_contribution,
            merge=self._settings,
            fragments=self._fragments,
            batch_groups=self._rules.batch_groups,
        )
        try:
            checked = await self._thread.do(lambda: check(one, groups, self._state))
        except ValueError as error:
            self._refuse(one, str(error), outcome="broken")
            return
        self._handed_in[name] = replace(one, disputed=checked.disputed)
        self._metrics.change_norm.labels(name).set(checked.norm)
        is_whole = len(one.group_ids) >= self._rules.hand_groups
        self._rounds.add(Added(name, one.contribution.base_version, checked.norm, is_whole))

    def _shut_out(self) -> None:
        """Forget contributors that were revoked, and what they handed in; deal all of their groups again."""
        for name in filter(self._revocations.is_revoked, self._deals.known):
            self._handed_in.pop(name, None)
            if name in self._rounds:
                self._rounds.remove(name)
            if self._streams.shut_out(name):
                self._metrics.contributions.labels(name, "revoked").inc()
            self._buffer.put_back(self._deals.forget(name))
            logger.warning("contributor revoked, its groups are dealt again", extra={"contributor": name})

    def _unfit(self) -> dict[str, Unfit]:
        """Return the contributions that can no longer be merged, and why."""
        unfit = self._rounds.refusals(version=self._state.version)
        oldest = self._state.progress.oldest_usable_version
        for name, one in self._handed_in.items():
            groups = self._deals.handed_in(name).values()
            drawn_from = min((group.oldest_version for group in groups), default=oldest)
            if min(one.contribution.base_version, drawn_from) < oldest:
                unfit[name] = Unfit("late", f"steps or groups of it are of before the rollback to {oldest}")
        # What is not in a round only says that it has these groups.
        in_rounds = {
            name: one.group_ids for name, one in sorted(self._handed_in.items()) if name in self._rounds
        }
        why = "a group of it is of a slot that another group was trained for"
        return {one: Unfit("groups", why) for one in doubled(in_rounds, self._state.trained_slots)} | unfit

    def _refuse(self, one: HandedIn, why: str, *, outcome: str, others: Sequence[str] = ()) -> None:
        """Tell a contributor why its contribution is not merged; deal its groups again.

        Args:
            others: groups that are taken from it, too.
        """
        name = one.contributor
        del self._handed_in[name]
        if name in self._rounds:
            self._rounds.remove(name)
        self._buffer.put_back(self._deals.give_back(name, [*one.group_ids, *others]))
        self._streams.refuse(name, why, taken=others)
        self._metrics.contributions.labels(name, outcome).inc()
        about = {"contributor": name, "number": one.contribution.number, "detail": why}
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
        doubted = self._doubted(handed_in)
        told = [group.group_id for one in handed_in for group in one.report.uninformative]
        if idle := [groups[group_id] for group_id in told if group_id not in doubted]:
            nothing = taught_nothing(idle, version=self._state.version, at_s=self._clock.now())
            if not await self._records.keep(nothing, idle):
                return False
        told = [group.group_id for one in handed_in for group in one.report.not_finite]
        not_finite = [groups[group_id] for group_id in told if group_id not in doubted]
        self._records.refuse(not_finite, verdict=Verdict.UNINFORMATIVE)
        self._end_round(handed_in, doubted)
        if is_version:
            self._show_rates()
        return is_version

    def _doubted(self, handed_in: list[HandedIn]) -> frozenset[str]:
        """Return the groups that taught nothing by the word of a contributor that is not believed."""
        present, doubted = self._deals.contributors, frozenset[str]()
        for one in handed_in:
            own = self._doubts.doubted(one.contributor, one.disputed, present=present)
            self._metrics.doubted_groups.labels(one.contributor).inc(len(own))
            doubted |= own
        return doubted

    def _show_rates(self) -> None:
        """Show the rates of the next merge, and what the newest one says of them."""
        rates = self._state.progress.outer_rates
        self._metrics.outer_rate.set(rates.of(self._settings).outer_rate)
        self._metrics.diverges.set(rates.are_lowered(self._settings))
        for name, cosine in self._state.merged.cosines.items():
            self._metrics.change_cosine.labels(name).set(cosine)
        if rates.are_lowered(self._settings) and not rates.norms:
            about = {"norm": rates.newest_norm, "outer_rate": rates.lowered}
            logger.error("merged changes grow as in divergence: the outer rate is lowered", extra=about)

    def _end_round(self, handed_in: list[HandedIn], doubted: frozenset[str]) -> None:
        """Answer contributors, and forget their groups but those that are dealt to others."""
        for one in handed_in:
            name = one.contributor
            del self._handed_in[name]
            self._buffer.put_back(self._deals.give_back(name, doubted))
            self._deals.consumed(name, one.group_ids)
            self._doubts.consumed(frozenset(one.group_ids) - doubted)
            self._streams.answer(name, replace(one.contributed, version=self._state.version))
            outcome = "merged" if one.report.steps else "empty"
            self._metrics.contributions.labels(name, outcome).inc()
        self._rounds.merged([one.contributor for one in handed_in], now=self._clock.monotonic())
