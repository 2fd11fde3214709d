"""Wires the services of a learner: which there are, who is told of what, in which order they stop.

    membership --run settings--> training loop --versions--> publisher --> store --> uploader
                                  ^         |
                               groups   verdicts, step records
                                  |         v
                                 rollout drain

They stop in the order in which work flows: training ends its step, the publisher codes the last version, the
coordinator has the last step record on disk, and then the learner leaves.
"""

import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpc.aio import Channel

from learner.config import LearnerConfig
from learner.intake.batch_buffer import BatchBuffer
from learner.joined_coordinator import join
from learner.metrics import Instruments
from learner.publishing.earlier_versions import EarlierVersions
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.kept_versions import KeptVersions, Wanted, was_skipped
from learner.publishing.publisher import Publisher
from learner.publishing.spaced_versions import Spacing
from learner.publishing.version_scorer import VersionScorer
from learner.records.step_writers import step_writers
from learner.restored_learner import RestoredLearner, restore, show_restart
from learner.step_log import StepLine
from learner.training.evidence import Evidence
from learner.training.training_loop import TrainingLoop
from node.clients.membership.membership_client import MembershipClient
from node.clients.rollouts.rollout_drain import RolloutDrain
from node.errors import StartupError
from node.identity.revocation import COPY_NAME as REVOCATION_COPY
from node.identity.revocation import RevocationCopy, RevocationList
from node.process.coordinator_link import CoordinatorLink
from node.process.role_context import RoleContext
from node.process.service import Service, StopsAfter
from node.rpc.calls.live_rpcs import RpcLimits
from node.rpc.calls.server import RpcServer, ServerLimits
from node.rpc.channel import Purpose
from node.serving.hub_setup import make_server
from node.serving.merge_servicer import MergeServicer, add_to_server
from node.system.backoff import Backoff
from node.values.groups.rollout import RolloutGroup
from node.values.limits import CHUNK_BYTES
from node.weights.assembly.stored import StoredVersions
from node.weights.transfer.artifact_uploader import ArtifactUploader

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

BULK_CONNECTIONS: Final = 4
"""For uploads; at 100 Mbit/s and 150 ms one connection fills 80 % of the link, four 97 %."""

DRAIN_BACKOFF_CAP_S: Final = 5.0
"""Short: there is one learner, and a coordinator that came back leases nothing until it is there."""


async def build(context: RoleContext) -> list[Service]:
    """Restore checkpoint and journal, in threads, and connect the learner's services.

    Raises:
        StartupError: key, model, checkpoint, journal or store cannot be used.
    """
    config = context.config.section(LearnerConfig)
    link = CoordinatorLink.of(context)
    with _disk_errors_explained(context.state_dir):
        restored = await restore(context, config)
        instruments = Instruments.of(context.registry, context.node_metrics, clock=context.clock)
        show_restart(restored.state, instruments.metrics)
        writers = step_writers(context, config, metrics=instruments.metrics)
    earlier = EarlierVersions(context.state_dir, restored.base, restored.policy.layout)
    scorer = None
    if not restored.policy.ranks.is_shared and config.merge is None:
        scorer = VersionScorer(
            earlier,
            restored.policy,
            micro_batch_tokens=config.micro_batch_tokens,
            packing=config.packing,
        )
    evidence = Evidence(
        config,
        clock=context.clock,
        metrics=instruments.metrics,
        score=None if scorer is None else scorer.score,
    )
    revoked = None if config.merge is None else RevocationCopy(context.state_dir / REVOCATION_COPY)
    buffer = BatchBuffer(capacity_groups=config.buffer_groups)
    drain = _drain(link.dial(Purpose.ROLLOUTS), buffer, config, restored, instruments)
    contributors = None
    if revoked is not None:
        revocations = RevocationList(lambda: revoked.node_ids)
        layout_digest = restored.policy.layout.digest
        contributors = MergeServicer(restored.base.model.root, layout_digest, revocations)
    coordinator = join(link, config, restored, evidence, revoked, contributors)

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
        earlier=earlier,
        was_skipped=lambda version: was_skipped(version, restored.store),
        instruments=instruments,
        contributors=contributors,
    )
    publisher = _publisher(context, config, restored, coordinator.membership, instruments)
    training = StopsAfter(loop)
    publishing = StopsAfter(publisher, other=training)
    draining = StopsAfter(drain, other=training)
    uploader = ArtifactUploader(
        restored.store,
        control=link.control,
        bulk=[link.dial(Purpose.BULK) for _ in range(BULK_CONNECTIONS)],
        metrics=context.transfer_metrics,
        random=random.random,
    )
    uploading = StopsAfter(uploader, other=publishing)
    writing = [StopsAfter(thread, other=training) for thread in writers]
    leaving = StopsAfter(coordinator.membership, other=draining)
    services: list[Service] = [leaving, uploading, draining, publishing, *writing, training]
    if contributors is not None:
        services.append(StopsAfter(_server(context, config, contributors), other=training))
    if restored.fleet is not None:
        services.insert(0, StopsAfter(restored.fleet, other=publishing))
    return services


def _drain(
    rollouts: Channel,
    buffer: BatchBuffer,
    config: LearnerConfig,
    restored: RestoredLearner,
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


def _server(context: RoleContext, config: LearnerConfig, contributors: MergeServicer) -> RpcServer:
    """Return the server on which contributors reach the learner."""
    assert config.merge is not None
    return make_server(
        context,
        "contributors",
        listen=config.merge.listen,
        revocations=contributors.revocations,
        servicers=(partial(add_to_server, contributors),),
        limits=ServerLimits(rpc=RpcLimits(submission_bytes=CHUNK_BYTES)),
    )


def _publisher(
    context: RoleContext,
    config: LearnerConfig,
    restored: RestoredLearner,
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
        leaves_out_unchanged=config.merge is None,
        instruments=instruments,
    )


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
