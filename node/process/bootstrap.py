"""Start a daemon from a valid configuration: registry, telemetry, identities, roles."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop

from node.checks.start_checks import open_files
from node.config.settings import NodeConfig, NodeSection, Resolved
from node.enrolment.enrolment_client import kept_name, obtain_identity
from node.enrolment.init_run import IDENTITY_DIRECTORY
from node.exit_code import ExitCode
from node.identity.files import cannot_make, make_private_directory
from node.identity.identity_store import Identity, expiries
from node.identity.own_identity import OwnIdentity
from node.identity.run_description import RunDescription
from node.page.live_page import LivePage
from node.process.abandoned_threads import exit_without_them
from node.process.daemon import Phase, StartStage, run_daemon
from node.process.last_start import note_settings
from node.process.memory import collect_seldom, keep_freed_memory
from node.process.process_end import PROCESS_END
from node.process.role_context import RoleContext, load_build
from node.process.service import Service
from node.process.systemd import Systemd, status_line
from node.process.telemetry_http import TelemetryServer
from node.system import descriptors
from node.system.clock import SystemClock
from node.system.file_lock import lock_state_directory
from node.telemetry.disk_watch import DiskWatch
from node.telemetry.logging import ForPeople, bind_peer, to_json
from node.telemetry.metrics import NodeMetrics, create_registry
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.roles import ROLES, Role
from node.weights.codec.exponent_conditioned.choice import implementation

logger = logging.getLogger(__name__)


def run(resolved: Resolved, *, roles: Sequence[Role]) -> ExitCode:
    """Run a process with ``roles``, in their order, until it is stopped; logging is configured already."""
    config = resolved.config
    logger.info("configuration", extra={"values": shown_settings(resolved)})
    computes_tensors = any(ROLES[role].has_model for role in roles)
    # Where it does, threads would wait for each other's allocations.
    keep_freed_memory(has_one_heap=not computes_tensors)
    if not computes_tensors:
        collect_seldom()
    logger.info("open files", extra={"limit": descriptors.raise_limit()})
    for scarcity in open_files(config, roles):
        logger.warning("few open files", extra={"detail": f"{scarcity.what}. {scarcity.fix}"})
    logger.info("weight codec", extra={"implementation": implementation().name})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exit_code = runner.run(_serve(config, roles=roles))
    exit_without_them(exit_code)
    PROCESS_END.exit_code = int(exit_code)
    return exit_code


def shown_settings(resolved: Resolved) -> ForPeople:
    """Return every value with its source; on a terminal only those that differ from their defaults."""
    whole = {row.name: f"{row.value} ({row.source})" for row in resolved.values}
    differing = (f"{row.name}={to_json(row.brief)}" for row in resolved.values if row.differs)
    return ForPeople(whole, shown=" ".join([*differing, "(all others have their defaults)"]))


async def _serve(config: NodeConfig, *, roles: Sequence[Role]) -> ExitCode:
    registry, clock = create_registry(), SystemClock()
    node_metrics = NodeMetrics(registry, roles=roles, clock=clock)
    page = LivePage(clock)

    def announce(phase: Phase) -> None:
        for observer in observers:
            observer.announce(phase)

    def status() -> str:
        return status_line(registry, roles, waits_for=node_metrics.waits_for)

    observers: list[Systemd | TelemetryServer] = [Systemd.from_environment(os.environ, status)]
    if (listen := config.telemetry.http_listen) is not None:
        server = TelemetryServer(
            listen=listen,
            may_move="http_listen" not in config.telemetry.model_fields_set,
            registry=registry,
            page=page.render,
            clock=clock,
            count_refusal=node_metrics.count_refusal,
            faults=node_metrics.faults,
        )
        observers.append(server)
    context_of = partial(
        RoleContext,
        config=config,
        registry=registry,
        node_metrics=node_metrics,
        transfer_metrics=TransferMetrics(registry),
        clock=clock,
        announce=announce,
        page=page,
    )

    async def hold_state() -> Sequence[Service]:
        for role in roles:
            _hold_state(config.node.state_dir / role)
        return ()

    async def build_telemetry() -> Sequence[Service]:
        return [*observers, DiskWatch(config.node.state_dir, metrics=node_metrics)]

    # The lock comes first: a second process in a directory should hear of that, not of a port that is taken.
    stages = [StartStage("state directory", hold_state), StartStage("telemetry", build_telemetry)]
    stages += [StartStage(role, partial(_build, role, config.node, context_of)) for role in roles]
    return await run_daemon(stages, drain_timeout_s=config.node.drain_timeout_s, announce=announce)


async def _build(role: Role, node: NodeSection, context_of: Callable[..., RoleContext]) -> Sequence[Service]:
    run_description = RunDescription.load(node.run_file)
    state_dir = node.state_dir / role
    identity = None
    if node.tls:
        directory = state_dir / IDENTITY_DIRECTORY
        obtained = await obtain_identity(
            directory,
            run=run_description,
            role=role,
            node_id=node.node_id,
            token_file=node.token_file,
            now=time.time(),
            warn=lambda detail: logger.warning("token readable by others", extra={"detail": detail}),
        )
        identity = OwnIdentity(obtained, directory)
    node_id = identity.current.node_id if identity else node.node_id or kept_name(state_dir, role=role)
    bind_peer(role=role, node_id=node_id)
    context = context_of(
        role=role, node_id=node_id, state_dir=state_dir, identity=identity, run=run_description
    )
    if identity is not None:
        identity.watch(partial(_show_expiries, context.node_metrics))
    # In a thread: importing torch takes seconds, and the watchdog does not wait.
    build_role = await asyncio.to_thread(load_build, role)
    services = await build_role(context)
    if (section := context.config.roles.get(role)) is not None:
        note_settings(state_dir, role=role, settings=section.model_dump(mode="json"))
    return services


def _show_expiries(metrics: NodeMetrics, identity: Identity) -> None:
    for name, not_after_s in expiries(identity):
        metrics.watch_certificate(name, not_after_s=not_after_s)


def _hold_state(state_dir: Path) -> None:
    """Make a role's directory and lock it, before anything is read or written there."""
    try:
        make_private_directory(state_dir)
    except OSError as error:
        raise cannot_make(state_dir, error, fix="Set node.state_dir to another directory.") from error
    lock_state_directory(state_dir)
