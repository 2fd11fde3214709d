"""The learner of a simulated run: production's account of groups, verdicts and buffer, without tensors.

It takes steps, or merges what contributors hand in (``merging``).

    journal (its disk) --survives--> next life: epoch + 1, the records that were not acknowledged, all slots

A step is in the journal before anybody hears of it; a death may come between the two.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from learner.intake.batch_buffer import BatchBuffer
from learner.intake.group_verdict import GroupRules, judge
from learner.intake.trained_slots import TrainedSlots
from learner.merging.contribution import Contributed
from learner.publishing.kept_versions import was_skipped
from node.clients.rollouts.outstanding_rollouts import OutstandingRollouts
from node.coordinator.fleet.peer_reports import HeartbeatReport, LearnerReport
from node.coordinator.streams.learner_stream import Quarantines
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.terms.model_check import Learner
from node.errors import RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.backoff import Backoff
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.policy import Announcement, PolicyVersion
from node.values.roles import Role
from node.values.run import StepRecord
from node.weights.planning.cheapest_chain import plan_upload
from simulation.faults import Plan
from simulation.hub import LAYOUT, RUN_ID, TOKENIZER, Hub, Shelf, announcement, peer_of, root_of
from simulation.hub_calls import HubCalls
from simulation.merging import Merging
from simulation.network import Network, Stream
from simulation.reached import NamedWaits
from simulation.virtual_loop import Clock, Process
from simulation.witness import Witness

VOCABULARY = 100
CONTEXT_TOKENS = 63
HEARTBEAT_S = 2.0
LOOK_S = 1.0
"""How late it notices that a coordinator lacks versions."""
RULES = dict(
    run_id=RUN_ID,
    layout_digest=LAYOUT,
    tokenizer_digest=TOKENIZER,
    vocabulary_size=VOCABULARY,
    context_tokens=CONTEXT_TOKENS,
    group_size=2,
)


@dataclass(slots=True)
class LearnerDisk:
    """The state that survives a learner."""

    epoch: int = 0
    journal: list[tuple[StepRecord, int]] = field(default_factory=list)
    """Steps, each with the newest version that had been acknowledged by then."""
    contributed: dict[str, Contributed] = field(default_factory=dict)
    """In the journal, too: the newest contribution of each contributor that was merged."""
    revoked: set[str] = field(default_factory=set)
    """Contributors that are shut out, as the coordinator has said."""
    shelf: Shelf = field(default_factory=Shelf)
    """The versions that were published."""
    is_full: bool = False
    dies_in_step: bool = False


class SimulatedLearner:
    """One life of the learner."""

    def __init__(
        self,
        plan: Plan,
        process: Process,
        disk: LearnerDisk,
        *,
        network: Network,
        hub: Callable[[], Hub | None],
        group_of: Callable[[bytes], RolloutGroup],
        draw: random.Random,
        clock: Clock,
        witness: Witness,
        reached: Counter[str],
        dies: Callable[[], None],
    ) -> None:
        disk.epoch += 1
        self.process = process
        self.is_stalled = False
        self.told: Stream[Any] | None = None
        """The coordinator's half of the open stream."""
        self._plan = plan
        self._disk = disk
        self._network = network
        self._hub = hub
        self._call = HubCalls(process, network, hub)
        self._group_of = group_of
        self._draw = draw
        self._clock = clock
        self._witness = witness
        self._dies = dies
        self._waits = NamedWaits(reached)
        self._peer = peer_of("learner", Role.LEARNER)
        self.version = len(disk.journal)
        acknowledged = disk.journal[-1][1] if disk.journal else 0
        self.trained_slots = TrainedSlots().with_groups(
            name for record, _ in disk.journal for name in record.group_ids
        )
        self._outstanding = OutstandingRollouts(
            version=self.version,
            capacity_groups=plan.buffer_groups,
            unacknowledged=[record for record, _ in disk.journal if record.version > acknowledged],
        )
        self._buffer = BatchBuffer(
            capacity_groups=plan.buffer_groups,
        )
        store: Any = disk.shelf
        self._rules = GroupRules(
            **RULES,  # type: ignore[arg-type]
            max_staleness_versions=plan.max_staleness_versions,
            was_skipped=lambda version: was_skipped(version, store),
        )
        self._sampler_of: dict[str, str] = {}
        """By group, as delivered."""
        self.task_digest: bytes | None = None
        """Digest of the task's options, as the coordinator said last."""
        self._owed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._stepped = asyncio.Event()
        self.merging: Merging | None = None
        if plan.contributors:
            self.merging = Merging(
                plan,
                self,
                disk.contributed,
                disk.revoked,
                buffer=self._buffer,
                drain=self._outstanding,
                wake=self._arrived.set,
                clock=clock,
                reached=reached,
            )

    def start(self) -> None:
        for work in (self._drain_for_ever(), self._train(), self._publish(), self._send_heartbeats()):
            self.process.spawn(work)

    def quarantine(self, sampler_id: str, why: str) -> None:
        self._outstanding.quarantine(sampler_id, why)
        self._owed.set()

    @property
    def waits_for(self) -> str:
        return self._waits.waits_for

    async def _drain_for_ever(self) -> None:
        backoff = Backoff(self._draw.random)
        while True:
            try:
                self.task_digest = await self._call(lambda hub: hub.join_learner(self._peer, self._as_told()))
                await self._one_stream()
                backoff.reset()
            except RefusedError as refused:
                if not refused.reason.is_retryable:
                    self._witness.violated(f"the learner is refused for good: {refused}")
                    return
            except ConnectionLost:
                pass
            with self._waits.waiting("coordinator"):
                await backoff.wait()

    def _as_told(self) -> Learner:
        return Learner(
            "learner",
            self._disk.epoch,
            LAYOUT,
            TOKENIZER,
            VOCABULARY,
            self._outstanding.version,
            base_root=root_of(0),
            context_tokens=CONTEXT_TOKENS,
        )

    async def _one_stream(self) -> None:
        link = self._network.link("learner", "coordinator")
        said: Stream[Any] = Stream(self.process.loop, link)
        told: Stream[Any] = Stream(self.process.loop, link)
        hub = self._hub()
        if hub is None or link.is_cut:
            raise ConnectionLost("the coordinator cannot be reached")
        self._outstanding.connected()
        hello = Hello(
            "learner",
            self._disk.epoch,
            self._outstanding.version,
            records=self._outstanding.unacknowledged,
            held_group_ids=self._outstanding.held_group_ids,
        )
        serving = hub.process.spawn(
            hub.serve_drain(hello, said, told, opened=self._witness.drain_opened(hub))
        )
        self.told = told
        writer = self.process.spawn(self._write(said))
        try:
            while (message := await told.next()) is not None:
                self._receive(message)
        finally:
            said.end(ConnectionLost("the learner's stream ended"))
            writer.cancel()
            if hub.process.is_alive:  # it notices a moment later
                self.process.loop.call_later(link.delay_s(), serving.cancel)

    async def _write(self, said: Stream[Any]) -> None:
        while True:
            self._owed.clear()
            owed = self._outstanding.take_owed()
            for message in (*owed.verdicts, *owed.steps, *owed.quarantines):
                said.send(message)
            if owed.credit_groups:
                said.send(owed.credit_groups)
            await self._owed.wait()

    def _receive(self, message: EncodedGroup | int | Quarantines) -> None:
        if isinstance(message, int):
            self._witness.acknowledged(message)
            self._outstanding.acknowledged(message)
        elif isinstance(message, Quarantines):
            listed = {one.sampler_id: one.quarantine for one in message.samplers}
            self._outstanding.quarantines_listed(listed, releases_others=message.releases_others)
        else:
            self._admit(message)

    def _admit(self, encoded: EncodedGroup) -> None:
        name = encoded.group_id
        if not self._outstanding.delivered(name):
            return
        group = self._group_of(encoded.columns)
        self._sampler_of[name] = encoded.sampler_id
        judged = judge(group, self._rules, version=self.version, trained_group_ids=self.trained_slots)
        if judged.verdict is Verdict.ACCEPTED and encoded.sampler_id in self._outstanding.quarantined:
            judged = GroupVerdict(name, Verdict.SUSPECT, "its sampler is quarantined")
        self._buffer.arrive(encoded)
        if judged.verdict is Verdict.ACCEPTED:
            self._buffer.admit(group)
            self._arrived.set()
        else:
            self._buffer.refuse(name)
        self.judged(judged, group)

    def judged(self, judged: GroupVerdict, group: RolloutGroup | None = None) -> None:
        self._witness.judged(judged, group)
        self._outstanding.judged(judged)
        self._owed.set()

    def passed_over(self, groups: Sequence[RolloutGroup], *, contributors: int) -> None:
        """Consume groups that taught contributors nothing."""
        for group in groups:
            self._witness.passed_over(group, contributors=contributors)
            self.judged(GroupVerdict(group.group_id, Verdict.UNINFORMATIVE))

    async def _train(self) -> None:
        while True:
            if self.is_stalled or not await self._advance():
                self._arrived.clear()
                taker = None if self.is_stalled or self.merging is None else self.merging.taker
                limit_s = 1.0 if taker is None else taker.pause_s
                what = "groups" if taker is None else taker.waits_for[0]
                with self._waits.waiting(what), contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await self._arrived.wait()

    async def _advance(self) -> bool:
        """Take a step, or do what is due of merging; return whether there may be more to do at once."""
        if self.merging is not None:
            return await self.merging.taker.advance()
        batch = self.next_batch(self._plan.batch_groups, task_digest=self.task_digest)
        if not batch:
            return False
        await asyncio.sleep(self._plan.step_s * self._draw.uniform(0.5, 1.5))
        if self._draw.random() < self._plan.uninformative:
            for group in batch:
                self.judged(GroupVerdict(group.group_id, Verdict.UNINFORMATIVE))
            return True
        names = tuple(group.group_id for group in batch)
        ages = tuple(self.version - group.oldest_version for group in batch)
        await self.keep(StepRecord(self.version + 1, names, ages), batch, ())
        return True

    def next_batch(
        self,
        groups: int,
        *,
        task_digest: bytes | None,
        is_wanted: Callable[[str], bool] = lambda _: True,
    ) -> tuple[RolloutGroup, ...]:
        """Evict what cannot be trained on any more, and take a batch."""
        for _, judged in self._buffer.evict(
            version=self.version,
            max_staleness_versions=self._plan.max_staleness_versions,
            task_digest=task_digest,
            shut_out=self._outstanding.quarantined,
            trained_group_ids=self.trained_slots,
        ):
            self.judged(judged)
        batch = self._buffer.take_batch(groups, is_wanted=is_wanted)
        self._witness.batched(batch, version=self.version)
        return batch

    async def keep(
        self, record: StepRecord, batch: tuple[RolloutGroup, ...], merged: Sequence[Contributed]
    ) -> None:
        """Put a step into the journal, then tell of it."""
        unacknowledged = self._outstanding.unacknowledged
        acknowledged = unacknowledged[0].version - 1 if unacknowledged else self.version
        while self._disk.is_full:
            with self._waits.waiting("disk"):
                await asyncio.sleep(1.0)
        self._disk.journal.append((record, acknowledged))
        self._disk.contributed |= {one.contributor: replace(one, version=record.version) for one in merged}
        self._witness.stepped(record, batch, sampler_of=self._sampler_of)
        self._witness.merged([(one.contributor, one.number) for one in merged], version=record.version)
        if self._disk.dies_in_step:
            self._disk.dies_in_step = False
            self._dies()
        await asyncio.sleep(0.01)
        self.version = record.version
        self.trained_slots = self.trained_slots.with_groups(record.group_ids)
        self._outstanding.stepped(record)
        self._owed.set()
        self._stepped.set()

    async def _publish(self) -> None:
        """Publish the newest version; those in between are skipped. Then upload what the hub lacks of all."""
        backoff, shelf = Backoff(self._draw.random), self._disk.shelf
        while True:
            self._stepped.clear()
            if (version := self.version) > shelf.head_number:
                await asyncio.sleep(0.2 * self._draw.random())
                shelf.publish(version)
            try:
                has_uploaded = await self._upload_next()
                backoff.reset()
            except (ConnectionLost, RefusedError):
                await backoff.wait()
                continue
            if not has_uploaded:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._stepped.wait()

    async def _upload_next(self) -> bool:
        """Upload what the hub lacks most; return whether it lacked something."""
        announced: Announcement | None = await self._call(announcement)
        there, shelf = () if announced is None else announced.artifacts, self._disk.shelf
        if (
            shelf.head_number and not there
        ):  # which began anew: at worst a keyframe is due, and all that it gets
            shelf.add_keyframe()
        lacks = plan_upload(shelf.artifacts.values(), remote=there, head=shelf.head_number)
        if lacks:
            await self._call(lambda hub: hub.upload(lacks[0]))
        return bool(lacks)

    async def _send_heartbeats(self) -> None:
        backoff = Backoff(self._draw.random)
        while True:
            report = HeartbeatReport(
                PolicyVersion(self.version, root_of(self.version)),
                waits_for=self.waits_for,
                learner=LearnerReport(
                    version_groups=0 if self.merging is None else self.merging.servicer.version_groups
                ),
            )
            try:
                await self._call(lambda hub: hub.heartbeat(self._peer, report, ()))  # noqa: B023 - awaited
                backoff.reset()
            except (ConnectionLost, RefusedError):
                await backoff.wait()
            await asyncio.sleep(HEARTBEAT_S)
