"""The coordinator of a simulated run: production's door, peers, ledger and upkeep.

Peers call ``Door`` and ``LearnerStreams``, as the servicers do for them. The store of policy versions is a
list of artifacts without bytes.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from node.coordinator.fleet.peer_reports import HeartbeatAnswer, HeartbeatReport, Joining
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.lifecycle.coordinator_service import UPKEEP_S, CoordinatorService
from node.coordinator.lifecycle.published import Published
from node.coordinator.operators.order_desk import LeaderDesk
from node.coordinator.peers.peer_table import PeerTable
from node.coordinator.peers.peers import Peers
from node.coordinator.requests.door import Door
from node.coordinator.run_status import LiveStatus, RunReport
from node.coordinator.streams.learner_stream import LearnerStream, LearnerStreams
from node.coordinator.streams.reward_checking import RewardChecking, Verifier
from node.coordinator.transactions.outcomes import Outcomes
from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Transaction
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions.announcements import task_is
from node.coordinator.work.decisions.decision import Batch
from node.coordinator.work.decisions.leasing import LeaseRequest, ReturnedLeases, release
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.decisions.submitted_groups import Submission, Submitted
from node.coordinator.work.decisions.trust import Quarantine
from node.coordinator.work.evaluation.held_out_score import answer_of
from node.coordinator.work.slots.slot import is_held_out
from node.coordinator.work.terms.model_check import Learner, SamplerModel, StatedText
from node.coordinator.work.terms.run_terms import NO_EVALUATION, EvaluationSettings, RunTerms, Work
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.rpc.call_ends import ConnectionLost
from node.system.waits import side_by_side
from node.telemetry.own_faults import OwnFaults
from node.values.groups.failure import FailedLease
from node.values.groups.rollout import EncodedGroup, GroupHeader, LeaseGrant, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.groups.verdict import Verdict
from node.values.policy import NO_BASE, Announcement, Artifact, ArtifactKey, BaseModel, PolicyVersion
from node.values.roles import Role
from node.weights.planning.cheapest_chain import newest_reachable
from node.wire.rollouts import finding_from_wire
from simulation.disks import DiedError, SimulatedDisk, SimulatedLedger
from simulation.faults import Plan
from simulation.network import Stream
from simulation.reached import Instruments
from simulation.virtual_loop import Clock, Process, VirtualLoop

RUN_ID = "run"
SAMPLING = SamplingParameters(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)
WORK = Work(RUN_ID, "addition", 2, SAMPLING, prompt_tokens=64)
LAYOUT, TOKENIZER = b"l" * 16, b"t" * 16
HELD_OUT_PROMPTS = 3
SILENT_AFTER_S = 8.0
HEARTBEAT_S = 2.0
PROMPT_RETRY_S = 40.0
KEYFRAME_EVERY_VERSIONS = 3
KEPT_KEYFRAMES = 2


def root_of(version: int) -> bytes:
    return version.to_bytes(16)


def terms_of(plan: Plan, task_digest: bytes) -> RunTerms:
    """Return what the run asks of its samplers, by the task's options as they are now."""
    evaluation = NO_EVALUATION
    if plan.evaluates_every_versions:
        evaluation = EvaluationSettings(
            every_versions=plan.evaluates_every_versions,
            prompts=HELD_OUT_PROMPTS,
            completions=2,
            temperature=1.0,
            sampling=SAMPLING,
            held_out_prompts=HELD_OUT_PROMPTS,
            task=WORK.task,
            task_options=task_digest.hex(),
        )
    return RunTerms(
        replace(WORK, task_digest=task_digest, verifiers_grade=plan.verifiers_grade),
        Bounds(
            concurrency_groups=plan.concurrency_groups,
            buffer_groups=plan.buffer_groups,
            batch_groups=plan.batch_groups,
            max_staleness_versions=plan.max_staleness_versions,
            buffer_bytes=1 << 20,
            verifiers_grade=plan.verifiers_grade,
        ),
        plan.prompts,
        prompt_seed=1,
        lease_ttl_s=plan.lease_ttl_s,
        lease_max_s=plan.lease_max_s,
        prompt_retry_s=PROMPT_RETRY_S,
        evaluation=evaluation,
    )


@dataclass(slots=True)
class Shelf:
    """Policy versions on the disk of the learner, or of a coordinator; whole artifacts only."""

    artifacts: dict[ArtifactKey, Artifact] = field(default_factory=dict)
    head_number: int = 0

    def publish(self, version: int) -> None:
        """Put in a version as a delta from the one before, and now and then as a keyframe."""
        base = self.head_number
        self.take(Artifact(ArtifactKey(version, base), 20_000 * (version - base)))
        if version // KEYFRAME_EVERY_VERSIONS != base // KEYFRAME_EVERY_VERSIONS:
            self.add_keyframe()

    def add_keyframe(self) -> None:
        """Put in the head as a keyframe, too."""
        self.take(Artifact(ArtifactKey(self.head_number, NO_BASE), 1_000_000))

    def take(self, artifact: Artifact) -> None:
        """Put in an artifact, and forget what is older than the oldest of the keyframes kept."""
        self.artifacts[artifact.key] = artifact
        self.head_number = max(self.head_number, newest_reachable(self.artifacts.values()) or 0)
        keyframes = sorted(key.version for key in self.artifacts if key.is_keyframe)
        if len(keyframes) > KEPT_KEYFRAMES:
            oldest = keyframes[-KEPT_KEYFRAMES]
            for key in [key for key in self.artifacts if key.version < oldest]:
                del self.artifacts[key]

    def announcement(self) -> Announcement | None:
        if not self.artifacts:
            return None
        head = PolicyVersion(self.head_number, root_of(self.head_number))
        return Announcement(head, 1, 0.0, tuple(self.artifacts.values()))

    def retained(self) -> tuple[ArtifactKey, ...]:
        return tuple(self.artifacts)

    def manifest(self, key: ArtifactKey) -> "_Manifest":
        return _Manifest(PolicyVersion(key.version, root_of(key.version)))

    def await_readers_of(self, version: int | None) -> None:
        """Keep nothing longer: readers here are done as they begin."""

    def listening(self, listener: Callable[[], None]) -> Any:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class _Manifest:
    policy_version: PolicyVersion


class WatchedLedger(RunLedger):
    """Says when memory and ledger must agree: after each commit, whether it failed or not."""

    settled: Callable[[Exception | None], None]

    async def _commit(self, batch: Batch) -> Exception | None:
        failure = await super()._commit(batch)
        if batch.transactions:
            self.settled(failure)
        return failure


@dataclass
class WatchedDoor(Door):
    """Says what was leased to whom, by whatever way, and what was said against a group."""

    granted: Callable[[str, LeaseGrant], None] = field(kw_only=True)
    objected: Callable[[Submission, str], None] = field(kw_only=True)

    async def lease(self, peer: Peer, request: LeaseRequest) -> LeaseGrant:
        grant = await Door.lease(self, peer, request)
        self.granted(peer.node_id, grant)
        return grant

    async def submit(self, request: Submission) -> Submitted:
        try:
            submitted = await Door.submit(self, request)
        except RefusedError as refused:
            self.objected(request, str(refused))
            raise
        if submitted.verdict is Verdict.FOREIGN:
            self.objected(request, submitted.detail)
        return submitted


class Hub:
    """One life of the coordinator."""

    def __init__(
        self,
        plan: Plan,
        process: Process,
        disk: SimulatedDisk,
        *,
        clock: Clock,
        shelf: Shelf,
        task_digest: bytes,
        reached: Counter[str],
        settled: Callable[["Hub", Exception | None], None],
        granted: Callable[["Hub", str, LeaseGrant], None],
        objected: Callable[["Hub", Submission, str], None],
    ) -> None:
        self.process = process
        self.shelf = shelf
        self._clock = clock
        loop: VirtualLoop = process.loop
        instruments: Any = Instruments(reached)
        self.ledger = SimulatedLedger.open(disk.directory / FILE_NAME, run_id=RUN_ID)
        self.ledger.disk = disk
        balance = self.ledger.balance()
        self.balance_at_start = balance
        self.accounts = Accounts(balance, terms_of(plan, task_digest), now=clock.now())
        decision = task_is(self.accounts, balance.task_digest, now=clock.now())
        if decision.transaction != Transaction():
            try:
                self.ledger.record(decision.transaction)
            except (DiedError, RefusedError):
                self.ledger.close()
                raise
            self.accounts.apply(decision.transaction, now=clock.now())
        store: Any = shelf
        self.published = Published(store, self.accounts)
        self.accounts.is_on_offer = self.published.is_on_offer
        self.peers = Peers(
            self.accounts,
            silent_after_s=SILENT_AFTER_S,
            heartbeat_interval_s=HEARTBEAT_S,
            head=self.published.head,
            metrics=instruments,
            random=draw_for(plan.seed, "pauses").random,
        )
        self.run_ledger = WatchedLedger(
            self.ledger, self.accounts, metrics=instruments, faults=OwnFaults(clock.monotonic), clock=clock
        )
        self.run_ledger.settled = lambda failure: settled(self, failure)
        loop.use_disk(self.run_ledger._thread, disk)
        outcomes = Outcomes(self.accounts, notify=self.peers.notify, metrics=instruments, clock=clock)
        outcomes.follow(self.run_ledger)
        self.learners = LearnerStreams(self.run_ledger)
        self.desk = LeaderDesk(self.run_ledger, self.learners)
        self.revocations = RevocationList(lambda: self.accounts.orders.revoked)
        table = PeerTable(self.peers, revoked=lambda: self.accounts.orders.revoked)
        self.door = WatchedDoor(
            self.run_ledger,
            self.peers,
            self.learners,
            self.revocations,
            clock,
            granted=lambda sampler_id, grant: granted(self, sampler_id, grant),
            objected=lambda request, what: objected(self, request, what),
        )
        self.checking = checking = RewardChecking(
            self.run_ledger, self.learners, rows=None, metrics=instruments, clock=clock
        )
        report = RunReport(RUN_ID, table, OwnFaults(clock.monotonic), clock)
        self.service = CoordinatorService(
            door=self.door,
            table=table,
            store=store,
            bucket=None,
            published=self.published,
            desk=self.desk,
            checking=checking,
            live=LiveStatus(report, loop),
            servers=(),
            order_server=None,
            metrics=instruments,
        )
        self._headers: dict[bytes, GroupHeader] = {}
        self.has_stopped = False
        """Whether it closed its ledger in good order."""

    async def keep_up(self) -> None:
        """Do once a second what the service does."""
        while True:
            await self.service._take_stock()
            await asyncio.sleep(UPKEEP_S)

    # What the servicers do, in their order.

    async def join_sampler(self, peer: Peer, held: PolicyVersion, *, instance: str, prompts: int) -> None:
        self._check_not_revoked(peer.node_id)
        model = SamplerModel(LAYOUT, StatedText(TOKENIZER), base=BaseModel(root_of(0)))
        joining = Joining(held, model, instance=instance, prompts=prompts, completes=bool(prompts))
        await self.door.join(peer, joining)

    async def join_learner(self, peer: Peer, learner: Learner) -> bytes:
        """Admit a learner; return the digest of the task's options."""
        await self.door.join(peer, Joining(PolicyVersion(learner.version), learner))
        return self.accounts.work.task_digest

    async def heartbeat(
        self, peer: Peer, report: HeartbeatReport, running: tuple[str, ...]
    ) -> tuple[HeartbeatAnswer, tuple[str, ...]]:
        self._check_not_revoked(peer.node_id)
        return self.door.heartbeat(peer, report, running)

    async def lease(self, peer: Peer, wanted: int, held: PolicyVersion | None, *, stays: bool) -> LeaseGrant:
        self._check_not_revoked(peer.node_id)
        return await self.door.lease(peer, LeaseRequest(peer.node_id, wanted, held, stays))

    async def release(self, peer: Peer, lease_ids: tuple[str, ...], failed: tuple[FailedLease, ...]) -> int:
        self._check_not_revoked(peer.node_id)
        decide = partial(release, request=ReturnedLeases(peer.node_id, lease_ids, failed))
        return (await self.run_ledger.decide(decide, caller=peer.node_id)).leases

    async def submit(self, encoded: EncodedGroup, group: RolloutGroup) -> Submitted:
        """Take a group in, whose sampler is proved."""
        if is_held_out(encoded.group_id):
            return await self.door.submit(Submission(encoded, group.header, answer_of(group)))
        return await self.door.submit(Submission(encoded, self._header_of(encoded.columns, group)))

    def _header_of(self, key: bytes, group: RolloutGroup) -> GroupHeader:
        header = self._headers.get(key)
        if header is None:
            header = self._headers[key] = group.header
        return header

    async def upload(self, artifact: Artifact) -> None:
        """Take an artifact of the learner's; it is on disk on return."""
        self.shelf.take(artifact)

    async def serve_drain(
        self, hello: Hello, said: Stream[Any], told: Stream[Any], *, opened: Callable[[Hello], None]
    ) -> None:
        """Serve a learner's stream until it ends."""
        try:
            drain = await self.learners.open(hello)
            opened(hello)
            listener = self.process.spawn(self._listen(said, drain))
            listener.add_done_callback(lambda _: drain.end())
            try:
                async for one in self.learners.deliver(drain):
                    told.send(one)
            finally:
                drain.end()
                listener.cancel()
                await asyncio.wait({listener})
            if not listener.cancelled() and (error := listener.exception()) is not None:
                raise error
            told.end()
        except (RefusedError, ConnectionLost) as error:
            told.end(error)
        except asyncio.CancelledError:
            told.end(ConnectionLost("the coordinator is gone"))
            raise

    async def serve_checks(self, node_id: str, groups: int, said: Stream[Any], told: Stream[Any]) -> None:
        """Serve a verifier's stream until it ends."""
        digest = self.accounts.work.task_digest
        verifier = self.checking.admit(node_id, task_digest=digest, groups=groups, noise_ratio=0.0)
        listener = self.process.spawn(self._take_findings(said, verifier))
        listener.add_done_callback(lambda _: self.checking.dismiss(verifier))
        try:
            async for group, _ in self.checking.groups(verifier):
                told.send(group)
            told.end()
        except (RefusedError, ConnectionLost) as error:
            told.end(error)
        except asyncio.CancelledError:
            told.end(ConnectionLost("the coordinator is gone"))
            raise
        finally:
            listener.cancel()

    async def _take_findings(self, said: Stream[Any], verifier: Verifier) -> None:
        with suppress(ConnectionLost):
            while (message := await said.next()) is not None:
                await self.checking.note(verifier, finding_from_wire(message))

    async def _listen(self, said: Stream[Any], drain: LearnerStream) -> None:
        places = asyncio.Semaphore(64)
        async with side_by_side() as tasks:
            while not drain.is_ended and (message := await said.next()) is not None:
                if drain.is_ended:
                    return
                await places.acquire()
                task = tasks.create_task(self._hear(message, drain))
                task.add_done_callback(lambda _: places.release())

    async def _hear(self, message: Any, drain: LearnerStream) -> None:
        match message:
            case (str(sampler_id), str(reason)):
                await self.learners.hear(drain, Quarantine(sampler_id, reason))
            case _:
                await self.learners.hear(drain, message)

    def _check_not_revoked(self, node_id: str) -> None:
        if self.revocations.is_revoked(node_id):
            raise RefusedError(Reason.REVOKED, f"{node_id} was revoked", is_remote=True)


async def announcement(hub: Hub) -> Announcement | None:
    """Return what a coordinator announces."""
    return hub.shelf.announcement()


def peer_of(node_id: str, role: Role) -> Peer:
    return Peer(RUN_ID, role, node_id)


def draw_for(seed: int, name: str) -> random.Random:
    """Return a source of chance of its own for whatever has this name."""
    return random.Random(f"{seed}/{name}")
