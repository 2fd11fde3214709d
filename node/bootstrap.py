"""From a valid configuration to a running daemon: registry, telemetry, identities, roles."""

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import uvloop
from prometheus_client import CollectorRegistry

from node.allocator import keep_freed_memory
from node.clock import Clock, SystemClock
from node.config import NodeConfig, NodeSection, Resolved
from node.daemon import Phase, Stage, run_daemon
from node.errors import ConfigError, ExitCode, RefusedError, StartupError
from node.identity.enrolment import enrol
from node.identity.files import make_private_directory, write_public
from node.identity.init_run import IDENTITY_DIRECTORY
from node.identity.peer import is_name
from node.identity.run_description import RunDescription
from node.identity.store import Identity, check_own, expiries, load_identity
from node.identity.tokens import Token
from node.role import ROLE_MODULES, RoleContext, load_build
from node.run import Role
from node.service import Service
from node.state_lock import StateLock
from node.systemd import Systemd
from node.telemetry.disk import DiskWatch
from node.telemetry.http import TelemetryServer
from node.telemetry.logging import bind_peer
from node.telemetry.metrics import NodeMetrics, create_registry
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.exponent_conditioned.choice import implementation

_log = logging.getLogger(__name__)

NAME_FILE: Final = "node_id"


def run(resolved: Resolved, *, roles: Iterable[str]) -> ExitCode:
    """Run a process with ``roles`` until it is stopped; logging is configured."""
    config = resolved.config
    names = [role for role in ROLE_MODULES if role in set(roles)]
    _log.info("configuration", extra={"values": {v.name: f"{v.value} ({v.source})" for v in resolved.values}})
    keep_freed_memory()
    _log.info("weight codec", extra={"implementation": implementation().name})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, roles=[Role(name) for name in names], clock=SystemClock()))


async def _serve(config: NodeConfig, *, roles: Sequence[Role], clock: Clock) -> ExitCode:
    registry = create_registry()
    node_metrics = NodeMetrics(registry, roles=roles, clock=clock)
    transfer_metrics = TransferMetrics(registry)
    systemd = Systemd.from_environment(os.environ)
    observers: list[Systemd | TelemetryServer] = [systemd]
    if config.telemetry.http_listen is not None:
        listen = config.telemetry.http_listen
        observers.append(TelemetryServer(listen=listen, registry=registry, clock=clock))

    async def hold_state() -> Sequence[Service]:
        for role in roles:
            _hold_state(config.node.state_dir / role)
        return ()

    async def build_telemetry() -> Sequence[Service]:
        return [*observers, DiskWatch(config.node.state_dir, metrics=node_metrics)]

    def announce(phase: Phase) -> None:
        for observer in observers:
            observer.announce(phase)

    # The lock comes first: a second process in a directory is told of that, not of a port that is taken.
    stages = [Stage("state directory", hold_state), Stage("telemetry", build_telemetry)]
    stages += [_role_stage(role, config, registry, node_metrics, transfer_metrics, clock) for role in roles]
    return await run_daemon(stages, drain_timeout_s=config.node.drain_timeout_s, announce=announce)


def _role_stage(
    role: Role,
    config: NodeConfig,
    registry: CollectorRegistry,
    node_metrics: NodeMetrics,
    transfer_metrics: TransferMetrics,
    clock: Clock,
) -> Stage:
    async def build() -> Sequence[Service]:
        run_description = RunDescription.load(config.node.run_file)
        state_dir = config.node.state_dir / role
        identity = None
        if config.node.tls:
            identity = await obtain_identity(config.node, role=role, run=run_description, now=clock.now())
        for name, not_after_s in () if identity is None else expiries(identity):
            node_metrics.watch_certificate(name, not_after_s=not_after_s)
        node_id = identity.node_id if identity else config.node.node_id or kept_name(state_dir, role=role)
        bind_peer(role=role, node_id=node_id)
        context = RoleContext(
            role=role,
            config=config,
            registry=registry,
            node_metrics=node_metrics,
            transfer_metrics=transfer_metrics,
            clock=clock,
            node_id=node_id,
            state_dir=state_dir,
            identity=identity,
            run=run_description,
        )
        # torch takes seconds; the watchdog does not wait
        build_role = await asyncio.to_thread(load_build, role)
        return await build_role(context)

    return Stage(role, build)


def _hold_state(state_dir: Path) -> None:
    """Make a role's directory and lock it, before anything is read or written there."""
    try:
        make_private_directory(state_dir)
    except OSError as error:
        raise StartupError(
            f"{state_dir} cannot be made: {error.strerror}", fix="Set node.state_dir to where it can."
        ) from error
    StateLock.take(state_dir)


async def obtain_identity(node: NodeSection, *, role: Role, run: RunDescription, now: float) -> Identity:
    """Give this peer's identity: the one on disk, else a new one for the token.

    Raises:
        StartupError: there is neither, or what there is will not be let in; says how to get a token.
        ConfigError: ``node.node_id`` is not the name in the identity on disk.
    """
    directory = node.state_dir / role / IDENTITY_DIRECTORY
    identity = load_identity(directory)
    if identity is not None:
        check_own(identity, run, role, now)
        if node.node_id not in (None, identity.node_id) and role is not Role.COORDINATOR:
            raise ConfigError(
                key="node.node_id",
                value=node.node_id,
                source="the configuration",
                rule=f"the certificate in {directory} names {identity.node_id}",
                fix="Leave node.node_id out, or move the directory away and enrol with a new token.",
            )
        return identity
    if role is Role.COORDINATOR:
        raise StartupError(
            f"There is no coordinator's certificate in {directory}",
            fix="Set node.state_dir to the directory made by `heterorl-node init DIR`.",
        )
    how = f"Make one where the coordinator runs: `heterorl-node token DIR --role {role} --address HOST:PORT`"
    if node.token_file is None:
        raise StartupError(
            f"This {role} has no certificate in {directory} and no token to get one",
            fix=f"{how}, and set node.token_file to a file that holds it.",
        )
    try:
        text = node.token_file.read_text(encoding="ascii")
        wanted = Token.parse(text).node_id
    except (OSError, UnicodeDecodeError, RefusedError) as error:
        raise StartupError(
            f"The token in {node.token_file} cannot be used: {error}", fix=f"{how}."
        ) from error
    return await enrol(
        text,
        run=run,
        role=role,
        node_id=node.node_id or wanted or kept_name(directory.parent, role=role),
        directory=directory,
        now=now,
    )


def kept_name(state_dir: Path, *, role: Role) -> str:
    """Give the random name this peer took at its first start."""
    path = state_dir / NAME_FILE
    try:
        name = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        name = f"{role}-{secrets.token_hex(4)}"
        make_private_directory(state_dir)
        write_public(path, name.encode() + b"\n")
    if not is_name(name):
        raise StartupError(f"{path} holds {name[:100]!r}, which is no node id", fix="Delete the file.")
    return name
