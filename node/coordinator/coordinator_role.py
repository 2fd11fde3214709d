"""Builds a coordinator from its section of the configuration."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from heterorl.v1 import (
    membership_pb2,
    membership_pb2_grpc,
    model_pb2_grpc,
    policy_pb2_grpc,
    rollout_pb2_grpc,
)
from node import limits
from node.coordinator.config import CoordinatorConfig
from node.coordinator.coordinator_service import CoordinatorService
from node.coordinator.data.row_sources import open_rows
from node.coordinator.data.rows import START_CHECK_S, RowCheck, Rows
from node.coordinator.held_back import FILE_NAME as HELD_BACK_FILE
from node.coordinator.held_back import HeldBack
from node.coordinator.ledger.backup_record import FILE_NAME as BACKUPS_FILE
from node.coordinator.ledger.backup_record import BackupRecord
from node.coordinator.ledger.ledger_file import FILE_NAME as LEDGER_FILE
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.live_status import LiveStatus
from node.coordinator.membership_servicer import MembershipServicer
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.model_servicer import ModelServicer
from node.coordinator.peer_requests import PeerRequests
from node.coordinator.peer_table import PeerTable
from node.coordinator.peers import Peers
from node.coordinator.published import Published
from node.coordinator.reward_checking import RewardChecking
from node.coordinator.rollout_servicer import RolloutServicer
from node.coordinator.run_members import RunMembers
from node.coordinator.run_rollouts import RunRollouts
from node.coordinator.run_status import RunReport
from node.coordinator.spool import Spool
from node.coordinator.submission_door import SubmissionDoor
from node.coordinator.transactions import Transactions
from node.coordinator.trust_upkeep import PARDONS, TrustUpkeep
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.run_data import NO_DATA, agreed_data
from node.coordinator.work.trust import task_is
from node.enrolment.authority import KEY_FILE
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import EnrolmentLedger, note_incomplete
from node.enrolment.enrolment_servicer import EnrolmentServicer
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.enrolment.move_notice import FILE_NAME as MOVE_FILE
from node.enrolment.move_notice import MoveNoticeFile
from node.enrolment.renewal import Renewal
from node.errors import ConfigError, DeposedError, Reason, RefusedError, StartupError
from node.identity.own_identity import RenewedCertificates
from node.identity.revocation import FILE_NAME as REVOCATION_FILE
from node.identity.revocation import RevocationList
from node.process.role_context import RoleContext
from node.process.service import Service
from node.protocol import OURS
from node.rpc.live_rpcs import RpcLimits
from node.rpc.server import Audience, RpcServer, ServerLimits
from node.run import RunSettings
from node.serving.hub_setup import bucket_mirror, make_server, open_store
from node.serving.policy_servicer import PolicyServicer
from node.weights.store.artifact_store import ArtifactStore
from node.weights.transfer.bucket_mirror import BucketMirror
from node.wire.mapping import to_wire
from node.wire.rollouts import largest_group_bytes

if TYPE_CHECKING:
    from node.coordinator.candidate import Candidate
    from node.coordinator.ledger.shared_records import SharedRecords

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
    from node.coordinator.candidate import Candidate, address_for_people
    from node.coordinator.ledger.leadership import Leadership

    async def lead(leadership: Leadership, on_lost: Callable[[DeposedError], None]) -> CoordinatorService:
        ledger = await asyncio.to_thread(leadership.open_ledger, on_lost=on_lost)
        records = await asyncio.to_thread(
            leadership.open_records, context.state_dir / ENROLMENT_FILE, on_lost=on_lost
        )
        await asyncio.to_thread(records.add_revoked_to, context.state_dir / REVOCATION_FILE)
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
    with ExitStack() as opened:
        opened.enter_context(closing(ledger))
        store = open_store(context, retained_keyframes=config.retained_keyframes)
        balance, rows = _read(ledger), None
        if config.data is not None:
            known = balance.data if balance.slots.next_slot else NO_DATA
            rows = await asyncio.to_thread(
                open_rows,
                config.data,
                scratch=context.state_dir,
                columns=config.columns,
                known=known,
                check=RowCheck(config.built_in_options, limit_s=START_CHECK_S),
            )
            opened.callback(rows.close)
            _tell_unusable(rows)
        _note_data(ledger, balance, rows)
        accounts = _accounts(context, config, ledger, rows, metrics)
        published = Published(store, accounts)
        _check_not_lost(accounts, published)
        opened.pop_all()  # the spool closes them
    revocations = RevocationList(context.state_dir / REVOCATION_FILE)
    peers = Peers(
        accounts,
        silent_after_s=config.silent_after_s,
        heartbeat_interval_s=config.heartbeat_interval_s,
        head=published.head,
        metrics=metrics,
        grader_digest=bytes.fromhex(config.grader_digest),
    )
    faults = context.node_metrics.faults
    transactions = Transactions(ledger, accounts, metrics=metrics, faults=faults, clock=context.clock)
    spool = Spool(
        transactions,
        rows=rows,
        is_published=published.has,
        notify=peers.notify,
        metrics=metrics,
        clock=context.clock,
        held_back=HeldBack(context.state_dir / HELD_BACK_FILE),
    )
    bucket = bucket_mirror(context, store, config.bucket)
    checking = RewardChecking(transactions, spool, rows=rows, notify=peers.notify, metrics=metrics)
    table = PeerTable(peers, revoked=lambda: revocations.current().node_ids)
    report = RunReport(
        context.run.run_id,
        table,
        spool.held_back,
        faults,
        context.clock,
        unusual_checks=lambda: checking.unusual,
    )
    live = LiveStatus(report, asyncio.get_running_loop())
    context.page.add(context.run.run_id, live.sections, is_moving=True)
    servers = [
        _members_server(context, config, store, spool, checking, report, revocations, bucket),
        *_enrolment_servers(context, config, revocations, records),
    ]
    trust = TrustUpkeep(spool, revocations=revocations, pardons=context.state_dir / PARDONS)
    if records is not None:
        trust.share = records.revoke
    return CoordinatorService(
        spool=spool,
        peers=peers,
        table=table,
        store=store,
        bucket=bucket,
        published=published,
        trust=trust,
        checking=checking,
        live=live,
        servers=servers,
        metrics=metrics,
        clock=context.clock,
    )


def _read(ledger: LedgerEngine) -> Balance:
    """Read a ledger at the start. Raises StartupError: it is damaged; RefusedError: as ``balance``."""
    try:
        balance = ledger.balance()
    except RefusedError as error:
        if error.reason is not Reason.DAMAGED:
            raise
        raise StartupError(error.what, fix=f"{error.fix[:1].upper()}{error.fix[1:]}.") from error
    if balance.unknown_facts:
        logger.warning(
            "the ledger has facts of a newer release, which are kept",
            extra={"kinds": dict(balance.unknown_facts)},
        )
    return balance


def _accounts(
    context: RoleContext,
    config: CoordinatorConfig,
    ledger: LedgerEngine,
    rows: Rows | None,
    metrics: CoordinatorMetrics,
) -> Accounts:
    """Restore the accounts; refuse groups in the spool that were graded by other options than the run's."""
    balance, now = ledger.balance(), context.clock.now()
    prompts = config.own_prompts() if rows is None else rows.prompts
    terms = config.terms(context.run.run_id, prompts=prompts)
    accounts = Accounts(balance, terms, now=now)
    if rows is not None:
        accounts.is_usable = rows.is_usable
    decision = task_is(accounts, before=balance.task_digest)
    ledger.record(decision.transaction)
    accounts.apply(decision.transaction, now=now)
    if decision.answer:
        metrics.misgraded_groups.labels("task options").inc(decision.answer)
        logger.warning(
            "task options changed; groups graded by the old ones are refused",
            extra={"groups": decision.answer, "task_digest": config.task_digest.hex()},
        )
    return accounts


def _members_server(
    context: RoleContext,
    config: CoordinatorConfig,
    store: ArtifactStore,
    spool: Spool,
    checking: RewardChecking,
    report: RunReport,
    revocations: RevocationList,
    bucket: BucketMirror | None,
) -> RpcServer:
    group_bytes, clock, renewed = _group_bytes(config), context.clock, RenewedCertificates()
    policy = PolicyServicer(store, metrics=context.transfer_metrics, bucket=bucket)
    requests = PeerRequests(report.table.peers, spool, revocations, clock)
    rollouts = RunRollouts(
        requests, spool, checking, group_bytes=group_bytes, metrics=context.transfer_metrics
    )
    models = ModelServicer(config.model_dir, metrics=context.transfer_metrics)
    members = RunMembers(
        requests,
        report,
        renewal=Renewal(
            context.state_dir / AUTHORITY_DIRECTORY,
            renewed,
            lifetime_s=config.certificate_lifetime_s,
            clock=clock,
        ),
        move=MoveNoticeFile(context.state_dir / MOVE_FILE),
        settings=to_wire(
            membership_pb2.JoinResponse,
            _settings(config, spool.rows, group_bytes=group_bytes),
            **dataclasses.asdict(OURS),
        ),
        revocations=revocations,
        clock=clock,
    )
    membership_servicer = MembershipServicer(members)
    door = SubmissionDoor(count_refusal=context.node_metrics.count_refusal, metrics=context.transfer_metrics)
    rollout_servicer = RolloutServicer(rollouts, door)
    return make_server(
        context,
        "members",
        limits=ServerLimits(RpcLimits(submission_bytes=group_bytes + limits.SUBMISSION_HEADER_BYTES)),
        listen=config.listen,
        revocations=revocations,
        renewed=renewed,
        servicers=(
            partial(membership_pb2_grpc.add_MembershipServiceServicer_to_server, membership_servicer),
            partial(model_pb2_grpc.add_ModelServiceServicer_to_server, models),
            partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, policy),
            partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, rollout_servicer),
        ),
    )


def _check_not_lost(accounts: Accounts, published: Published) -> None:
    """A new ledger would number slots from the start again: groups of two prompts would share their ids."""
    head = published.head()
    if accounts.learner is None and accounts.open_loss is None and head is not None:
        raise StartupError(
            f"the ledger knows of no learner, but version {head.number} was published",
            fix=f"Restore {LEDGER_FILE} from a backup: `heterorl-node ledger restore FILE --state-dir DIR`.",
        )


def _note_data(ledger: LedgerEngine, balance: Balance, rows: Rows | None) -> None:
    """Note the run's rows in the ledger; refuse others once something was leased."""
    found, known_part = (NO_DATA, b"") if rows is None else (rows.seen, rows.known_part)
    noted = agreed_data(balance.data, found, known_part=known_part, next_slot=balance.slots.next_slot)
    if noted is not None:
        ledger.record(Transaction(facts=(noted,)))
        if noted.first_slot:
            grown = {"rows": noted.rows, "rows_before": balance.data.rows, "first_slot": noted.first_slot}
            logger.info("rows were added to the data", extra=grown)


def _tell_unusable(rows: Rows) -> None:
    """Log which rows are never leased; ConfigError where that leaves none."""
    tally = rows.tally
    if not tally.unusable:
        return
    held_out = sum(not rows.is_usable(index) for index in rows.evaluation)
    if tally.unusable - held_out == rows.prompts:
        raise ConfigError(
            key="coordinator.data.file",
            value=tally.checked,
            source="the configuration",
            rule=f"no row can be trained on: {tally.summary()}",
            fix="Correct the rows or coordinator.task_options.",
        )
    logger.warning(
        "rows that cannot be used are not leased",
        extra={
            "rows": tally.unusable,
            "rows_in_all": len(rows),
            "rows_held_out": held_out,
            "detail": tally.summary()[:2000],
        },
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
