"""Builds a learner from its section of the configuration.

    membership --run settings--> training loop --versions--> publisher --> store --> uploader
                                  ^         |
                               groups   verdicts, step records
                                  |         v
                                 rollout drain

They stop in the order in which work flows: training ends its step, the publisher codes the last version, the
coordinator has the last step record on disk, and then the learner leaves.
"""

import asyncio
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpc.aio import Channel

from learner.config import LearnerConfig
from learner.intake.batch_buffer import BatchBuffer
from learner.journal.records import Origin
from learner.masters.master_words import PolicyWords
from learner.metrics import Instruments, LearnerMetrics
from learner.model.model import Policy
from learner.model.work_shares import ONE_RANK, Ranks
from learner.operator_orders import check_no_older_orders, recent_changes
from learner.publishing.earlier_versions import EarlierVersions
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.kept_versions import PUBLISHED, KeptVersions, Wanted
from learner.publishing.publisher import Publisher
from learner.publishing.signer import Signer
from learner.publishing.spaced_versions import Spacing
from learner.publishing.version_scorer import VersionScorer
from learner.records.sample_writer import SampleWriter, load_tokenizer
from learner.records.trackers import TensorBoardWriter, WandbWriter
from learner.records.writer_thread import StepWriter, WriterThread
from learner.step.trainer import load_models
from learner.step_log import StepLine, StepLog
from learner.training.evidence import Evidence
from learner.training.order_taker import OrderTaker
from learner.training.training_loop import TrainingLoop
from learner.training.training_state import TrainingState
from node.clients.heartbeats import Notices, PeerReports
from node.clients.join_call import Member
from node.clients.membership_client import MembershipClient, Uplink
from node.clients.rollout_drain import RolloutDrain
from node.enrolment.move_notice import MovedCoordinator
from node.errors import StartupError
from node.identity.peer import Peer
from node.page.run_sections import SHOWN_GROUPS, RunView, run_sections
from node.page.samples_file import FILE_NAME, SamplesFile
from node.process.role_context import RoleContext
from node.process.service import Service, StopsAfter
from node.rpc.channel import Backoff, Purpose, dial
from node.rpc.hub import Hub
from node.system.clock import Clock
from node.text.text_rules import TextRules
from node.text.tokenizer import chat_template_digest, tokenizer_digest
from node.values.evaluation import EvaluationNotice
from node.values.policy import PolicyVersion
from node.values.rollout import RolloutGroup
from node.values.run import Role
from node.weights.assembly.public_base import PublicBase
from node.weights.assembly.stored import StoredVersions
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.artifact_uploader import ArtifactUploader
from node.weights.transfer.sources import watch_versions

if TYPE_CHECKING:
    from learner.ranks.launching import Fleet

logger = logging.getLogger(__name__)

BULK_CONNECTIONS: Final = 4
"""For uploads; at 100 Mbit/s and 150 ms one connection fills 80 % of the link, four 97 %."""

DRAIN_BACKOFF_CAP_S: Final = 5.0
"""Short: there is one learner, and a coordinator that came back leases nothing until it is there."""

RETAINED_KEYFRAMES: Final = 2
"""In the learner's own store, for a coordinator that lost its disk."""


async def build(context: RoleContext) -> list[Service]:
    """Restore checkpoint and journal, in threads, and connect the learner's services.

    Raises:
        StartupError: key, model, checkpoint, journal or store cannot be used.
    """
    config = context.config.section(LearnerConfig)
    target = context.config.node.coordinator
    if target is None:
        raise StartupError(
            "The learner does not know its coordinator", fix="Set node.coordinator = HOST:PORT."
        )
    with _disk_errors_explained(context.state_dir):
        restored = await _restore(context, config)
        check_no_older_orders(context.state_dir, restored.state.progress)
        instruments = Instruments.of(context.registry, context.node_metrics, clock=context.clock)
        _show_restart(restored.state, instruments.metrics)
        writers = _writer_threads(context, config, metrics=instruments.metrics)
    earlier = EarlierVersions(context.state_dir, restored.base, restored.policy.layout)
    scorer = None
    if not restored.policy.ranks.is_shared:
        scorer = VersionScorer(earlier, restored.policy, micro_batch_tokens=config.micro_batch_tokens)
    evidence = Evidence(
        config, clock=context.clock, metrics=instruments.metrics, has_words=scorer is not None
    )
    caller = context.identity or Peer(context.run.run_id, Role.LEARNER, context.node_id)
    hub = Hub(target)
    moved = MovedCoordinator(hub, context.run, context.state_dir)
    control, rollouts, *bulk = (
        dial(hub, caller, purpose=purpose, now=context.clock.now())
        for purpose in (Purpose.CONTROL, Purpose.ROLLOUTS, *[Purpose.BULK] * BULK_CONNECTIONS)
    )
    coordinator = _join(context, moved, control, config, restored, evidence)
    buffer = BatchBuffer(capacity_groups=config.buffer_groups)
    drain = _drain(rollouts, buffer, config, restored, instruments)

    def on_step(line: StepLine | None, batch: Sequence[RolloutGroup]) -> None:
        for thread in writers:
            thread.offer(line, batch)

    loop = TrainingLoop(
        restored.state,
        coordinator=coordinator,
        buffer=buffer,
        drain=drain,
        evidence=evidence,
        step_log=restored.step_log,
        on_step=on_step,
        operator=OrderTaker(
            earlier,
            config=config,
            state=restored.state,
            drain=drain,
            step_log=restored.step_log,
            instruments=instruments,
        ),
        instruments=instruments,
        score=None if scorer is None else scorer.score,
    )
    publisher = _publisher(context, config, restored, coordinator.membership, instruments)
    training = StopsAfter(loop)
    publishing = StopsAfter(publisher, other=training)
    draining = StopsAfter(drain, other=training)
    uploader = ArtifactUploader(
        restored.store, control=control, bulk=bulk, metrics=context.transfer_metrics, random=random.random
    )
    uploading = StopsAfter(uploader, other=publishing)
    writing = [StopsAfter(thread, other=training) for thread in writers]
    leaving = StopsAfter(coordinator.membership, other=draining)
    services: list[Service] = [leaving, uploading, draining, publishing, *writing, training]
    if restored.fleet is not None:
        services.insert(0, StopsAfter(restored.fleet, other=publishing))
    return services


@dataclass(frozen=True, slots=True)
class _Restored:
    """The learner as its state directory has it."""

    signer: Signer
    store: ArtifactStore
    state: TrainingState
    step_log: StepLog
    base: PublicBase
    fleet: "Fleet | None"
    """The other ranks; None: there are none."""

    @property
    def policy(self) -> Policy:
        return self.state.policy


async def _restore(context: RoleContext, config: LearnerConfig) -> _Restored:
    directory = context.state_dir
    signer = Signer.load(directory, context.run)
    fleet = await asyncio.to_thread(_start_ranks, config)
    if fleet is not None:
        await fleet.met()
    ranks: Ranks = ONE_RANK if fleet is None else fleet.group
    policy, reference = await asyncio.to_thread(load_models, config, device=config.device, ranks=ranks)
    base = await asyncio.to_thread(_keep_public_base, directory / "base.words", policy.master_words)
    store = await asyncio.to_thread(
        ArtifactStore,
        directory / PUBLISHED,
        public_key=context.run.learner_public_key,
        run_id=context.run.run_id,
        retained_keyframes=RETAINED_KEYFRAMES,
    )
    state = await asyncio.to_thread(
        TrainingState,
        config,
        policy,
        directory=directory,
        origin=Origin(context.run.run_id, policy.layout.digest.hex(), base.model.root.hex()),
        clock=context.clock,
        published=store.head,
        reference=reference,
    )
    step_log = StepLog(directory / "steps.jsonl")
    await asyncio.to_thread(step_log.catch_up, state.progress.step)
    return _Restored(signer, store, state, step_log, base, fleet)


def _show_restart(state: TrainingState, metrics: LearnerMetrics) -> None:
    again = state.restart
    metrics.checkpoint_version.set(again.checkpoint_version)
    metrics.journal_bytes.set(state.journal_bytes)
    metrics.replay_seconds.set(again.took_s)
    if again.version == 0:
        return
    metrics.replays.labels(again.outcome).inc()
    fields = {
        "version": again.version,
        "checkpoint_version": again.checkpoint_version,
        "published_version": again.published_version,
        "words": again.outcome,
        "took_s": round(again.took_s, 3),
    }
    logger.info("restored", extra=fields)
    if again.replayed_steps and again.changed:
        logger.warning("steps were taken again with other settings", extra={"changed": list(again.changed)})
    if again.is_exact is False:
        logger.warning(
            "the steps taken again made other words than those published, which stay: the next version is a "
            "delta from them",
            extra={"version": again.published_version},
        )


class JoinedCoordinator:
    """The coordinator as the training loop asks it, over the membership stream."""

    def __init__(self, membership: MembershipClient, member: Member, control: Channel, clock: Clock) -> None:
        self.membership = membership
        self.run_id, self.tokenizer_digest = member.run_id, member.tokenizer_digest
        self.settings, self.next_answer = membership.settings, membership.heartbeats.next_answer
        self._control = control
        self._clock = clock

    async def announced(self, version: int) -> None:
        """Wait until ``version``, or a newer one, is announced."""
        async for announcement in watch_versions(self._control, random=random.random):
            if announcement.head.number >= version:
                return

    @property
    def evaluations(self) -> EvaluationNotice:
        """Evaluations, as the last answer told them."""
        return self.membership.heartbeats.evaluations

    @property
    def task_digest(self) -> bytes | None:
        """Digest of the options by which the run's groups are graded now; None: not told."""
        return self.membership.task_digest

    def now(self) -> float:
        """Return Unix seconds on the coordinator's clock."""
        return self._clock.now() + self.membership.heartbeats.clock_offset_s


def _join(
    context: RoleContext,
    moved: MovedCoordinator,
    control: Channel,
    config: LearnerConfig,
    restored: _Restored,
    evidence: Evidence,
) -> JoinedCoordinator:
    policy, state, clock = restored.policy, restored.state, context.clock
    rules = TextRules.of(config.model_dir)
    member = Member(
        context.run.run_id,
        Role.LEARNER,
        layout_digest=policy.layout.digest,
        layout_summary=policy.layout.summary,
        tokenizer_digest=tokenizer_digest(config.model_dir),
        chat_template_digest=chat_template_digest(config.model_dir),
        text_digest=rules.digest,
        text_summary=rules.summary,
        learner_epoch=restored.signer.learner_epoch,
        vocabulary_size=policy.vocabulary_size,
        context_tokens=policy.scorer.context_tokens,
    )
    reports = PeerReports(
        held=lambda: PolicyVersion(state.version),
        waits_for=lambda: context.node_metrics.waits_for or state.completion,
        machine=context.machine_figures,
        step_report=lambda: evidence.report_of(state.progress.step),
        teaching=lambda: evidence.teaching,
        base=lambda: restored.base.model,
        best_version=lambda: state.best_version,
        changes=lambda: recent_changes(state.progress, now=clock.now()),
    )
    membership = MembershipClient(
        control,
        member,
        Uplink(clock, Backoff(random.random), context.node_metrics.waiting, context.identity, moved.hub),
        reports=reports,
        notices=Notices(moved=moved.learn),
    )
    return JoinedCoordinator(membership, member, control, clock)


def _drain(
    rollouts: Channel,
    buffer: BatchBuffer,
    config: LearnerConfig,
    restored: _Restored,
    instruments: Instruments,
) -> RolloutDrain:
    return RolloutDrain(
        rollouts,
        buffer.arrive,
        learner_epoch=restored.signer.learner_epoch,
        version=restored.state.version,
        capacity_groups=config.buffer_groups,
        unacknowledged=restored.state.progress.unacknowledged,
        trained_slots=restored.state.trained_slots.runs,
        backoff=Backoff(random.random, cap_s=DRAIN_BACKOFF_CAP_S),
        count_lost_stream=instruments.metrics.lost_drain_streams.inc,
        waiting=instruments.node_metrics.waiting,
    )


def _publisher(
    context: RoleContext,
    config: LearnerConfig,
    restored: _Restored,
    membership: MembershipClient,
    instruments: Instruments,
) -> Publisher:
    state, words = restored.state, restored.policy.master_words
    stored = StoredVersions(restored.store, words.layout, restored.base.words)

    def wanted() -> Wanted:
        told = membership.heartbeats.evaluations
        worth = (state.best_version, told.best, told.under_way)
        return Wanted([version for version in worth if version is not None], is_all=told.is_told)

    spacing = Spacing(config.keyframe_every_versions, most=config.keep_spaced_versions)
    kept = KeptVersions(stored.store, wanted=wanted, spacing=spacing)
    further = FurtherArtifacts(
        stored,
        restored.signer,
        keyframe_every_versions=config.keyframe_every_versions,
        public_delta_every_versions=config.public_delta_every_versions,
        longest_lag_versions=lambda: membership.heartbeats.longest_lag_versions,
    )
    return Publisher(
        state.master_access,
        words.coder(threads=config.publish_threads or _cores(), spool=restored.store.draft),
        further,
        before_keyframe=kept.secure,
        run_settings=membership.settings,
        oldest_usable_version=lambda: state.progress.oldest_usable_version,
        instruments=instruments,
    )


def _writer_threads(
    context: RoleContext, config: LearnerConfig, *, metrics: LearnerMetrics
) -> list[WriterThread]:
    samples = SamplesFile(context.state_dir / FILE_NAME)
    context.page.add(
        context.run.run_id, lambda: run_sections(RunView(samples=samples.newest(SHOWN_GROUPS)[::-1]))
    )
    writers: list[StepWriter] = []
    if config.samples_every_versions:
        tokenizer = load_tokenizer(config.model_dir)
        every_versions, groups = config.samples_every_versions, config.samples_groups
        writers.append(SampleWriter(samples, tokenizer, every_versions=every_versions, groups=groups))
    if config.tensorboard_dir is not None:
        writers.append(TensorBoardWriter(config.tensorboard_dir))
    if config.wandb_project is not None:
        writers.append(
            WandbWriter(
                config.wandb_project,
                run_id=context.run.run_id,
                directory=context.state_dir,
                configuration=config.model_dump(mode="json"),
            )
        )
    return [WriterThread(writer, metrics=metrics) for writer in writers]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _disk_errors_explained(state_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartupError(
            f"{error.filename or state_dir} cannot be read or written: {error.strerror}",
            fix="Make room on the disk of the state directory, or set node.state_dir to where it can be.",
        ) from error


def _start_ranks(config: LearnerConfig) -> "Fleet | None":
    if config.mesh.ranks == 1 and "WORLD_SIZE" not in os.environ:
        return None
    from learner.ranks.launching import Fleet

    return Fleet(config)


def _keep_public_base(path: Path, words: PolicyWords) -> PublicBase:
    return PublicBase.keep(path, words.digests(), words.copy_frames, layout=words.layout)
