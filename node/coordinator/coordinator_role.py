"""Builds a coordinator from its section of the configuration."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from heterorl.v1 import (
    membership_pb2,
    membership_pb2_grpc,
    model_pb2_grpc,
    policy_pb2_grpc,
    rollout_pb2_grpc,
)
from node.coordinator.config import CoordinatorConfig
from node.coordinator.data.rows import Rows
from node.coordinator.ledger.backup_record import FILE_NAME as BACKUPS_FILE
from node.coordinator.ledger.backup_record import BackupRecord
from node.coordinator.ledger.ledger_file import FILE_NAME as LEDGER_FILE
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.lifecycle.coordinator_service import CoordinatorService
from node.coordinator.lifecycle.open_run import open_run
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.operators.order_desk import LeaderDesk, order_server
from node.coordinator.peers.peer_table import PeerTable
from node.coordinator.peers.peers import Peers
from node.coordinator.requests.door import Door
from node.coordinator.requests.membership_servicer import MembershipServicer
from node.coordinator.requests.model_servicer import ModelServicer
from node.coordinator.requests.rollout_servicer import RolloutServicer
from node.coordinator.requests.submission_door import SubmissionDoor
from node.coordinator.run_status import LiveStatus, RunReport
from node.coordinator.streams.learner_stream import LearnerStreams
from node.coordinator.streams.reward_checking import RewardChecking
from node.coordinator.transactions.outcomes import Outcomes
from node.coordinator.transactions.run_ledger import RunLedger
from node.enrolment.authority import KEY_FILE
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import EnrolmentLedger, note_incomplete
from node.enrolment.enrolment_servicer import EnrolmentServicer
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.enrolment.renewal import Renewal
from node.errors import DeposedError
from node.identity.own_identity import RenewedCertificates
from node.identity.revocation import RevocationList
from node.process.role_context import RoleContext
from node.process.service import Service
from node.rpc.calls.live_rpcs import RpcLimits
from node.rpc.calls.server import Audience, RpcServer, ServerLimits
from node.serving.hub_setup import bucket_mirror, make_server
from node.serving.policy_servicer import PolicyServicer
from node.values import limits
from node.values.protocol import OURS
from node.values.run import RunSettings
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket_mirror import BucketMirror
from node.wire.mapping import to_wire
from node.wire.rollouts import largest_group_bytes

if TYPE_CHECKING:
    from node.coordinator.ledger.shared_records import SharedRecords
    from node.coordinator.lifecycle.takeover import Candidate

logger = logging.getLogger(__name__)


async def build(context: RoleContext) -> list[Service]:
    """Open what the coordinator keeps on disk and put its services together.

    Raises:
        StartupError: the ledger, the store, the bucket or the data cannot be opened, or the ledger was lost.
        ConfigError: a row is bad, or the data is not the run's.
    """
    config = context.config.section(CoordinatorConfig)
    metrics = CoordinatorMetrics(context.registry)
    metrics.max_staleness_versions.set(config.max_staleness_versions)
    if config.ledger is not None:
        return [await _candidate(context, config, config.ledger, metrics)]
    metrics.leads.set(1)
    metrics.backups.record = partial(BackupRecord.load, context.state_dir / BACKUPS_FILE)
    ledger = Ledger.open(context.state_dir / LEDGER_FILE, run_id=context.run.run_id)
    return [await _coordinator(context, config, metrics, ledger)]


async def _candidate(
    context: RoleContext, config: CoordinatorConfig, url: str, metrics: CoordinatorMetrics
) -> "Candidate":
    # An extra: imported only where it is used.
    from node.coordinator.ledger.leadership import Leadership
    from node.coordinator.lifecycle.takeover import Candidate, address_for_people

    async def lead(leadership: Leadership, on_lost: Callable[[DeposedError], None]) -> CoordinatorService:
        ledger = await asyncio.to_thread(leadership.open_ledger, on_lost=on_lost)
        records = await asyncio.to_thread(
            leadership.open_records, context.state_dir / ENROLMENT_FILE, on_lost=on_lost
        )
        return await _coordinator(context, config, metrics, ledger, records=records)

    await asyncio.to_thread(note_incomplete, context.state_dir / ENROLMENT_FILE)
    leadership = await asyncio.to_thread(
        partial(Leadership, url, run_id=context.run.run_id, address=address_for_people(config.listen))
    )
    return Candidate(context, leadership, config.listen, build=lead, metrics=metrics)


async def _coordinator(
    context: RoleContext,
    config: CoordinatorConfig,
    metrics: CoordinatorMetrics,
    ledger: LedgerEngine,
    *,
    records: "SharedRecords | None" = None,
) -> CoordinatorService:
    """Return the coordinator that serves the run from its ledger, which it closes if it cannot."""
    run = await open_run(context, config, ledger, metrics)
    accounts, clock, faults = run.accounts, context.clock, context.node_metrics.faults
    revocations = RevocationList(lambda: accounts.orders.revoked)
    peers = Peers(
        accounts,
        silent_after_s=config.silent_after_s,
        heartbeat_interval_s=config.heartbeat_interval_s,
        head=run.published.head,
        metrics=metrics,
        grader_digest=bytes.fromhex(config.grader_digest),
    )
    run_ledger = RunLedger(ledger, accounts, metrics=metrics, faults=faults, clock=clock)
    Outcomes(accounts, notify=peers.notify, metrics=metrics, clock=clock).follow(run_ledger)
    learners = LearnerStreams(run_ledger)
    desk = LeaderDesk(run_ledger, learners)
    door = Door(run_ledger, peers, learners, revocations, clock, rows=run.rows)
    bucket = bucket_mirror(context, run.store, config.bucket)
    checking = RewardChecking(run_ledger, learners, rows=run.rows, metrics=metrics, clock=clock)
    table = PeerTable(peers, revoked=lambda: revocations.current().node_ids)
    report = RunReport(
        context.run.run_id,
        table,
        faults,
        clock,
        unusual_checks=lambda: checking.unusual,
    )
    live = LiveStatus(report, asyncio.get_running_loop())
    context.page.add(context.run.run_id, live.sections, is_moving=True)
    servers = [
        _members_server(context, config, run.store, door, checking, report, bucket),
        *_enrolment_servers(context, config, revocations, records),
    ]
    return CoordinatorService(
        door=door,
        table=table,
        store=run.store,
        bucket=bucket,
        published=run.published,
        desk=desk,
        checking=checking,
        live=live,
        servers=servers,
        order_server=order_server(context.state_dir, desk),
        metrics=metrics,
    )


def _members_server(
    context: RoleContext,
    config: CoordinatorConfig,
    store: ArtifactStore,
    door: Door,
    checking: RewardChecking,
    report: RunReport,
    bucket: BucketMirror | None,
) -> RpcServer:
    group_bytes, renewed = _group_bytes(config), RenewedCertificates()
    policy = PolicyServicer(store, metrics=context.transfer_metrics, bucket=bucket)
    models = ModelServicer(config.model_dir, metrics=context.transfer_metrics)
    members = MembershipServicer(
        door,
        report,
        settings=to_wire(
            membership_pb2.JoinResponse,
            _settings(config, door.rows, group_bytes=group_bytes),
            **dataclasses.asdict(OURS),
        ),
        renewal=Renewal(
            context.state_dir / AUTHORITY_DIRECTORY,
            renewed,
            lifetime_s=config.certificate_lifetime_s,
            clock=door.clock,
        ),
        move=lambda: door.ledger.accounts.orders.notice,
    )
    rollouts = RolloutServicer(
        door,
        checking,
        SubmissionDoor(count_refusal=context.node_metrics.count_refusal, metrics=context.transfer_metrics),
        group_bytes=group_bytes,
        metrics=context.transfer_metrics,
    )
    submission_bytes = (
        max(group_bytes, limits.JOINED_GROUPS_BYTES)
        + limits.GROUPS_PER_REQUEST * limits.SUBMISSION_HEADER_BYTES
    )
    return make_server(
        context,
        "members",
        limits=ServerLimits(RpcLimits(submission_bytes=submission_bytes)),
        listen=config.listen,
        revocations=door.revocations,
        renewed=renewed,
        servicers=(
            partial(membership_pb2_grpc.add_MembershipServiceServicer_to_server, members),
            partial(model_pb2_grpc.add_ModelServiceServicer_to_server, models),
            partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, policy),
            partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, rollouts),
        ),
    )


def _settings(config: CoordinatorConfig, rows: Rows | None, *, group_bytes: int) -> RunSettings:
    return RunSettings(
        task=config.task,
        group_size=config.group_size,
        batch_groups=config.batch_groups,
        max_staleness_versions=config.max_staleness_versions,
        heartbeat_interval_s=config.heartbeat_interval_s,
        head=None,
        sampling=config.sampling,
        task_options_json=config.task_options_json,
        task_digest=config.task_digest,
        verifiers_grade=config.verifiers_grade,
        prompts=0 if rows is None else rows.prompts,
        group_bytes=group_bytes,
    )


def _group_bytes(config: CoordinatorConfig) -> int:
    evaluation = config.evaluation_settings
    return max(
        largest_group_bytes(
            group_size=group_size, max_new_tokens=max_new_tokens, prompt_tokens=config.prompt_tokens
        )
        for group_size, max_new_tokens in (
            (config.group_size, config.max_new_tokens),
            (evaluation.completions, evaluation.sampling.max_new_tokens),
        )
    )


def _enrolment_servers(
    context: RoleContext,
    config: CoordinatorConfig,
    revocations: RevocationList,
    records: "SharedRecords | None",
) -> list[RpcServer]:
    if context.identity is None:
        return []
    authority = context.state_dir / AUTHORITY_DIRECTORY
    if not (authority / KEY_FILE).exists():
        logger.warning("the authority's key is not here: nobody is let in, no certificate is renewed")
    servicer = EnrolmentServicer(
        authority=authority,
        lifetime_s=config.certificate_lifetime_s,
        ledger=records or EnrolmentLedger(context.state_dir / ENROLMENT_FILE),
        revocations=revocations,
        clock=context.clock,
    )
    server = make_server(
        context,
        "enrolment",
        listen=config.enrolment_listen,
        revocations=revocations,
        servicers=(partial(membership_pb2_grpc.add_EnrolmentServiceServicer_to_server, servicer),),
        audience=Audience.STRANGERS,
    )
    return [server]
