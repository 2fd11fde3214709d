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
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from learner.config import LearnerConfig
from learner.disk_wait import DiskWait
from learner.metrics import LearnerMetrics
from learner.publishing.catch_up_deltas import CatchUpDeltas
from learner.publishing.public_base import keep_public_base
from learner.publishing.publisher import Publisher
from learner.publishing.publishing_schedule import PublishingSchedule
from learner.publishing.signer import Signer
from learner.records.sample_writer import SampleWriter, load_tokenizer
from learner.records.samples_file import FILE_NAME, SamplesFile
from learner.records.samples_page import GROUPS, render_page
from learner.records.trackers import TensorBoardWriter, WandbWriter
from learner.records.writer_thread import StepWriter, WriterThread
from learner.step_log import StepLine, StepLog
from learner.training.model import Policy, ScoringModel, load_policy, load_reference
from learner.training.training_loop import TrainingLoop
from learner.training.training_state import TrainingState
from node.clients.heartbeats import Notices, PeerReports
from node.clients.membership_client import Member, MembershipClient
from node.clients.rollout_drain import RolloutDrain
from node.errors import StartupError
from node.identity.peer import Peer
from node.policy import PolicyVersion
from node.process.role_context import RoleContext
from node.process.service import Service
from node.process.stop_order import StopsAfter
from node.rollout import DeliveredGroup
from node.rpc.channel import Backoff, Purpose, dial
from node.run import Role
from node.telemetry.metrics import snapshot
from node.tokenizer import chat_template_digest, tokenizer_digest
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.artifact_uploader import ArtifactUploader
from node.weights.transfer.watch import watch_versions

BULK_CONNECTIONS: Final = 4
"""For uploads; at 100 Mbit/s and 150 ms one connection fills 80 % of the link, four 97 %."""

DRAIN_BACKOFF_CAP_S: Final = 5.0
"""Short: there is one learner, and a coordinator that came back leases nothing until it is there."""

RETAINED_KEYFRAMES: Final = 2
"""In the learner's own store, for a coordinator that lost its disk."""


async def build(context: RoleContext) -> list[Service]:
    """Restore the newest checkpoint, in threads, and connect the learner's services.

    Raises:
        StartupError: key, model, checkpoint or store cannot be used.
    """
    config = context.config.section(LearnerConfig)
    target = context.config.node.coordinator
    if target is None:
        raise StartupError(
            "The learner does not know its coordinator", fix="Set node.coordinator = HOST:PORT."
        )
    state_dir, clock, run_id = context.state_dir, context.clock, context.run.run_id
    disk_wait = DiskWait(node_metrics=context.node_metrics, clock=clock, random=random.random)
    step_log = StepLog(state_dir / "steps.jsonl")
    with _disk_errors_explained(state_dir):
        signer = Signer.load(state_dir, context.run)
        policy = await asyncio.to_thread(_load_base_model, config)
        reference = await asyncio.to_thread(_load_reference, config)
        words0, base = await asyncio.to_thread(
            keep_public_base, state_dir / "base.words", policy.master_words, layout=policy.layout
        )
        training_state = await asyncio.to_thread(
            TrainingState.load,
            config,
            policy,
            reference=reference,
            directory=state_dir / "checkpoints",
            clock=clock,
        )
        await asyncio.to_thread(step_log.catch_up, training_state.progress.step)
    metrics = LearnerMetrics(context.registry, peak_tflops=config.peak_tflops)
    digest = tokenizer_digest(config.model_dir)
    samples = SamplesFile(state_dir / FILE_NAME)
    context.pages["/samples"] = lambda: render_page(reversed(samples.newest(GROUPS)))
    with _disk_errors_explained(state_dir):
        writers = _step_writers(config, samples, run_id=run_id, state_dir=state_dir)
    writer_threads = [WriterThread(writer, metrics=metrics) for writer in writers]

    def write_down(line: StepLine, batch: Sequence[DeliveredGroup]) -> None:
        for thread in writer_threads:
            thread.offer(line, batch)

    def write_down_first(delivered: DeliveredGroup) -> None:
        for thread, writer in zip(writer_threads, writers, strict=True):
            if isinstance(writer, SampleWriter):
                thread.put(writer.write_of_first(delivered, at_s=clock.now()))

    caller = context.identity or Peer(run_id, Role.LEARNER, context.node_id)
    control, rollouts, *bulk = (
        dial(target, caller, purpose=purpose, now=clock.now())
        for purpose in (Purpose.CONTROL, Purpose.ROLLOUTS, *[Purpose.BULK] * BULK_CONNECTIONS)
    )

    async def announced(version: int) -> None:
        async for announcement in watch_versions(control, random=random.random):
            if announcement.head.number >= version:
                return

    membership = MembershipClient(
        control,
        Member(
            run_id,
            Role.LEARNER,
            layout_digest=policy.layout.digest,
            layout_summary=policy.layout.summary,
            tokenizer_digest=digest,
            chat_template_digest=chat_template_digest(config.model_dir),
            learner_epoch=signer.learner_epoch,
            vocabulary_size=policy.vocabulary_size,
            context_tokens=policy.context_tokens,
        ),
        reports=PeerReports(
            held=lambda: PolicyVersion(training_state.version),
            waits_for=lambda: context.node_metrics.waits_for or loop.completion,
            metrics=lambda: snapshot(context.registry, Role.LEARNER),
            step_report=lambda: loop.report,
            teaching=lambda: loop.teaching,
            base=lambda: base,
            best_version=lambda: training_state.best_version,
        ),
        notices=Notices(),
        clock=clock,
        backoff=Backoff(random.random),
        waiting=context.node_metrics.waiting,
        identity=context.identity,
    )
    drain = RolloutDrain(
        rollouts,
        learner_epoch=signer.learner_epoch,
        version=training_state.version,
        capacity_groups=config.buffer_groups,
        unacknowledged=training_state.progress.unacknowledged,
        backoff=Backoff(random.random, cap_s=DRAIN_BACKOFF_CAP_S),
        count_lost_stream=metrics.lost_drain_streams.inc,
        waiting=context.node_metrics.waiting,
    )
    store = ArtifactStore(
        state_dir / "published",
        public_key=context.run.learner_public_key,
        run_id=run_id,
        retained_keyframes=RETAINED_KEYFRAMES,
    )
    publisher = Publisher(
        training_state.master_access,
        policy.master_words,
        store,
        start=training_state.held_policy(),
        layout=policy.layout,
        signer=signer,
        threads=config.publish_threads or _cores(),
        schedule=PublishingSchedule(
            store,
            keyframe_every_versions=config.keyframe_every_versions,
            public_delta_every_versions=config.public_delta_every_versions,
            longest_lag_versions=lambda: membership.longest_lag_versions,
        ),
        catch_up=CatchUpDeltas(store, layout=policy.layout, words0=words0, signer=signer),
        run_settings=membership.settings,
        disk_wait=disk_wait,
        clock=clock,
        metrics=metrics,
    )
    uploader = ArtifactUploader(
        store, control=control, bulk=bulk, metrics=context.transfer_metrics, random=random.random
    )
    loop = TrainingLoop(
        training_state,
        step_log=step_log,
        config=config,
        run_id=run_id,
        tokenizer_digest=digest,
        run_settings=membership.settings,
        drain=drain,
        announced=announced,
        evaluations=lambda: membership.evaluations,
        next_answer=membership.next_answer,
        on_step=write_down,
        published=lambda: publisher.newest,
        coordinator_now=lambda: clock.now() + membership.clock_offset_s,
        clock=clock,
        disk_wait=disk_wait,
        metrics=metrics,
        node_metrics=context.node_metrics,
        task_digest=lambda: membership.task_digest,
        on_first=write_down_first,
    )
    training = StopsAfter(loop)
    writing = [StopsAfter(thread, other=training) for thread in writer_threads]
    publishing = StopsAfter(publisher, other=training)
    draining = StopsAfter(drain, other=training)
    uploading = StopsAfter(uploader, other=publishing)
    return [StopsAfter(membership, other=draining), uploading, draining, publishing, *writing, training]


def _step_writers(
    config: LearnerConfig, samples: SamplesFile, *, run_id: str, state_dir: Path
) -> list[StepWriter]:
    writers: list[StepWriter] = []
    if config.samples_every_versions:
        tokenizer = load_tokenizer(config.model_dir)
        every_versions, groups = config.samples_every_versions, config.samples_groups
        writers.append(SampleWriter(samples, tokenizer, every_versions=every_versions, groups=groups))
    if config.tensorboard_dir is not None:
        writers.append(TensorBoardWriter(config.tensorboard_dir))
    if config.wandb_project is not None:
        shown = config.model_dump(mode="json")
        writers.append(
            WandbWriter(config.wandb_project, run_id=run_id, directory=state_dir, configuration=shown)
        )
    return writers


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


def _load_base_model(config: LearnerConfig) -> Policy:
    if config.threads:
        torch.set_num_threads(config.threads)
    return load_policy(
        config.model_dir,
        device=config.device,
        compute_dtype=_compute_dtype(config),
        checkpoints_activations=config.checkpoints_activations,
    )


def _load_reference(config: LearnerConfig) -> ScoringModel | None:
    if config.reference_kl_coefficient == 0:
        return None
    return load_reference(config.model_dir, device=config.device, compute_dtype=_compute_dtype(config))


def _compute_dtype(config: LearnerConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.compute_dtype == "bfloat16" else None
