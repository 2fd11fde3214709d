"""Builds a coordinator: the hub of a run, from its section of the configuration."""

from collections.abc import Callable
from functools import partial
from typing import Final

import grpc.aio

from heterorl.v1 import membership_pb2_grpc, policy_pb2_grpc, rollout_pb2_grpc
from node.coordinator.config import CoordinatorConfig
from node.coordinator.hub import Hub
from node.coordinator.ledger.ledger_file import FILE_NAME as LEDGER_FILE
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.membership_servicer import MembershipServicer
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peers import Roster
from node.coordinator.published import Published
from node.coordinator.rollout_servicer import RolloutServicer
from node.coordinator.spool import Spool
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.buffer_room import Work
from node.enrolment.authority import Authority
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.enrolment_servicer import EnrolmentServicer
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.errors import StartupError
from node.identity.revocation import FILE_NAME as REVOCATION_FILE
from node.identity.revocation import RevocationList
from node.process.role_context import RoleContext
from node.process.service import Service
from node.rpc.server import Audience, RpcServer
from node.run import RunSettings
from node.serving.policy_servicer import PolicyServicer, damage_first
from node.telemetry.fleet_collector import FleetCollector
from node.weights.store.artifact_store import ArtifactStore

VERSIONS_DIRECTORY: Final = "versions"

AddServicer = Callable[[grpc.aio.Server], None]


async def build(context: RoleContext) -> list[Service]:
    """Open what the coordinator keeps on disk and put its services together.

    Raises:
        StartupError: the ledger or the store cannot be opened, or the ledger was lost.
    """
    config = context.config.section(CoordinatorConfig)
    run_id, clock = context.run.run_id, context.clock
    metrics = CoordinatorMetrics(context.registry)
    metrics.max_staleness_versions.set(config.max_staleness_versions)
    fleet = FleetCollector()
    context.registry.register(fleet)
    store = ArtifactStore(
        context.state_dir / VERSIONS_DIRECTORY,
        public_key=context.run.learner_public_key,
        run_id=run_id,
        retained_keyframes=config.retained_keyframes,
    )
    ledger = Ledger.open(context.state_dir / LEDGER_FILE, run_id=run_id)
    accounts = Accounts(
        ledger.balance(),
        task=config.task,
        prompts=config.prompts,
        seed=config.prompt_seed,
        lease_ttl_s=config.lease_ttl_s,
        prompt_retry_s=config.prompt_retry_s,
        now=clock.now(),
    )
    published = Published(store, accounts.versions)
    _check_remembered(accounts, published, ledger)
    roster = Roster(
        accounts, silent_after_s=config.silent_after_s, head=published.head, fleet=fleet, metrics=metrics
    )
    spool = Spool(
        ledger,
        accounts,
        work=Work(run_id, config.task, config.group_size, config.sampling),
        bounds=config.bounds,
        lease_ttl_s=config.lease_ttl_s,
        is_published=published.has,
        tell=roster.tell,
        metrics=metrics,
        clock=clock,
    )
    policy = PolicyServicer(
        store,
        metrics=context.transfer_metrics,
        damage=damage_first(config.chaos_damage_frames) if config.chaos_damage_frames else None,
    )
    rollouts = RolloutServicer(spool, roster, metrics=context.transfer_metrics)
    revocations = RevocationList(context.state_dir / REVOCATION_FILE)
    membership = MembershipServicer(
        roster,
        spool,
        run_id=run_id,
        settings=_settings(config),
        configured_prompts=config.prompts,
        revocations=revocations,
        clock=clock,
    )
    members, enrolment = _servers(
        context,
        config,
        revocations,
        (
            partial(membership_pb2_grpc.add_MembershipServiceServicer_to_server, membership),
            partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, policy),
            partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, rollouts),
        ),
    )
    return [
        Hub(
            spool=spool,
            roster=roster,
            store=store,
            published=published,
            members=members,
            enrolment=enrolment,
            metrics=metrics,
            clock=clock,
        )
    ]


def _check_remembered(accounts: Accounts, published: Published, ledger: Ledger) -> None:
    """A new ledger would number slots from the start again: groups of two prompts would share their ids."""
    head = published.head()
    if accounts.learner is None and accounts.open_loss is None and head is not None:
        ledger.close()
        raise StartupError(
            f"the ledger knows of no learner, but version {head.number} was published",
            fix=f"Restore {LEDGER_FILE} from a backup: `heterorl-node ledger restore FILE --state-dir DIR`.",
        )


def _settings(config: CoordinatorConfig) -> RunSettings:
    return RunSettings(
        task=config.task,
        group_size=config.group_size,
        batch_groups=config.batch_groups,
        max_staleness_versions=config.max_staleness_versions,
        heartbeat_interval_s=config.heartbeat_interval_s,
        head=None,
        sampling=config.sampling,
    )


def _servers(
    context: RoleContext,
    config: CoordinatorConfig,
    revocations: RevocationList,
    servicers: tuple[AddServicer, ...],
) -> tuple[RpcServer, RpcServer | None]:
    """Give the members' server, and the one that lets new peers in: none where TLS is off."""
    make_server = partial(
        RpcServer,
        run_id=context.run.run_id,
        identity=context.identity,
        revocations=revocations,
        clock=context.clock,
        count_refusal=context.node_metrics.count_refusal,
        drain_grace_s=context.config.node.drain_timeout_s / 2,
    )
    members = make_server("members", listen=config.listen, servicers=servicers)
    if context.identity is None:
        return members, None
    servicer = EnrolmentServicer(
        authority=Authority.load(context.state_dir / AUTHORITY_DIRECTORY),
        ledger=EnrolmentLedger(context.state_dir / ENROLMENT_FILE),
        revocations=revocations,
        clock=context.clock,
    )
    enrolment = make_server(
        "enrolment",
        listen=config.enrolment_listen,
        servicers=(partial(membership_pb2_grpc.add_EnrolmentServiceServicer_to_server, servicer),),
        audience=Audience.STRANGERS,
    )
    return members, enrolment
