"""Everything that a start of roles needs, as checks: files, permissions, certificates, tokens; and what each
role's section of the configuration adds: packages, models, data, code.

Not checked: whether a port is free (a running daemon has its own ports), whether anyone can be reached (see
``node.commands.doctor.way_checks``), whether the device exists (``machine_checks``), and what only loading
the weights can show.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from node.checks.check import Check, Finding, Grade, Needs, Surroundings
from node.config.settings import NodeConfig, NodeSection
from node.enrolment.authority import present_authority
from node.enrolment.init_run import AUTHORITY_DIRECTORY, IDENTITY_DIRECTORY, SIGNING_KEY_FILE
from node.enrolment.tokens import how_to_get_a_token, usable_token
from node.errors import ConfigError, StartupError
from node.identity.files import cannot_make
from node.identity.identity_store import identity_on_disk
from node.identity.run_description import RunDescription
from node.identity.signatures import SigningKey
from node.rpc.address import is_loopback, split_address
from node.system import descriptors
from node.system.clock import moment
from node.values.roles import ROLES, Role

_RELAYED_PEERS: Final = 256


def start_checks(
    config: NodeConfig,
    roles: Iterable[Role],
    *,
    now: float,
    told: Callable[[str], None] = lambda text: None,
) -> list[Check]:
    """Return the checks of all that a start of ``roles`` needs; to list them reads nothing.

    Args:
        told: Called now and then with how far a long check is.
    """
    roles = tuple(roles)
    return [
        Check("open files", Needs.CONFIGURATION, partial(open_files, config, roles)),
        *_checks_of_run(config.node, config, roles, now=now),
        *_checks_of_sections(config, roles, told),
    ]


def open_files(config: NodeConfig, roles: Iterable[Role]) -> list[Finding]:
    """Return a warning if a hub may not open enough files for the peers it expects."""
    hubs = [role for role in roles if ROLES[role].is_hub]
    most = descriptors.hard_limit()
    room = descriptors.peers_with_room(most)
    expected, why = _RELAYED_PEERS, "a relay may serve"
    section: Any = config.roles.get(Role.COORDINATOR)
    if Role.COORDINATOR in hubs and section is not None:
        expected, why = section.concurrency_groups, "coordinator.concurrency_groups lets work at once"
    if not hubs or room >= expected:
        return []
    scarcity = Finding(
        "open files",
        Grade.WARN,
        f"this process may have {most} files open, which is room for {room} peers with "
        f"{descriptors.CONNECTIONS_PER_PEER} connections each, and {why} {expected}",
        "Raise the hard limit: LimitNOFILE of the systemd unit, `ulimit -Hn` of a shell, `--ulimit nofile` "
        "of a container",
    )
    return [scarcity]


def _checks_of_run(
    node: NodeSection, config: NodeConfig, roles: tuple[Role, ...], *, now: float
) -> Iterator[Check]:
    """Yield the checks of state directories, identities and keys; those of the run only if it is known."""
    for role in roles:
        yield Check("state directory", Needs.DISK, partial(_state_dir, node.state_dir / role))
        if not node.tls:
            yield Check("loopback", Needs.CONFIGURATION, partial(_loopback, config, role))
    run = Check("run file", Needs.DISK, partial(_run_file, node.run_file))
    yield run
    for role in roles if node.tls else ():
        yield Check("identity", Needs.DISK, partial(_identity, node, role, now), after=(run,))
    if node.tls and Role.COORDINATOR in roles:
        path = node.state_dir / Role.COORDINATOR / AUTHORITY_DIRECTORY
        yield Check("authority", Needs.DISK, partial(_authority, path), after=(run,))
    if Role.LEARNER in roles:
        path = node.state_dir / Role.LEARNER / SIGNING_KEY_FILE
        yield Check("signing key", Needs.DISK, partial(_signing_key, path, node.run_file), after=(run,))


def _checks_of_sections(
    config: NodeConfig, roles: tuple[Role, ...], told: Callable[[str], None]
) -> Iterator[Check]:
    sections: list[tuple[Role, Any]] = [(role, config.roles[role]) for role in roles if role in config.roles]
    models = (getattr(section, "model_dir", None) for _, section in sections)
    model_dir = next(filter(None, models), None)
    for role, section in sections:
        yield from section.checks(Surroundings(config.node.state_dir / role, model_dir, told))


def _state_dir(directory: Path) -> Iterator[Finding]:
    fix = "Set node.state_dir to another directory."
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise cannot_make(directory, NotADirectoryError(20, f"{there} is not a directory"), fix=fix)
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise cannot_make(directory, PermissionError(13, "Permission denied"), fix=fix)
    yield Finding("state directory", Grade.OK, f"{directory} can be written")


def _run_file(path: Path) -> Iterator[Finding]:
    run = RunDescription.load(path)
    yield Finding("run file", Grade.OK, f"{path} is that of run {run.run_id}")


def _identity(node: NodeSection, role: Role, now: float) -> Iterator[Finding]:
    directory, run = node.state_dir / role / IDENTITY_DIRECTORY, RunDescription.load(node.run_file)
    known = identity_on_disk(directory, role=role, run=run, node_id=node.node_id, now=now)
    if known is not None:
        until = moment(known.not_after_s)
        yield Finding("identity", Grade.OK, f"{known.node_id} has a certificate until {until}")
        return
    found = usable_token(node.token_file, directory, run=run, role=role)
    if now >= found.token.expires_at_s:
        raise StartupError(
            f"The token in {node.token_file} expired at {moment(found.token.expires_at_s)}, "
            f"and this machine's clock says {moment(now)}",
            fix=f"{how_to_get_a_token(role)}.",
        )
    if node.node_id is not None and found.token.node_id not in (None, node.node_id):
        raise ConfigError(
            key="node.node_id",
            value=node.node_id,
            source="the configuration",
            rule=f"the token in {node.token_file} is for {found.token.node_id}",
            fix="Leave node.node_id out, or ask for another token.",
        )
    if found.exposure:
        yield Finding("identity", Grade.WARN, found.exposure)
    else:
        until = moment(found.token.expires_at_s)
        yield Finding("identity", Grade.OK, f"the token in {node.token_file} lets a {role} in until {until}")


def _authority(path: Path) -> Iterator[Finding]:
    is_here = present_authority(path) is not None
    what = "can issue certificates" if is_here else "has no key, which is kept elsewhere: no token is taken"
    yield Finding("authority", Grade.OK, f"{path} {what}")


def _signing_key(path: Path, run_file: Path) -> Iterator[Finding]:
    key, run = SigningKey.load(path), RunDescription.load(run_file)
    if key.public_key != run.learner_public_key:
        raise StartupError(
            f"{path} is not the key that run {run.run_id} is signed with",
            fix="Use signing key and run.json of the same `heterorl-node init`.",
        )
    yield Finding("signing key", Grade.OK, f"{path} is the one that run {run.run_id} is signed with")


def _loopback(config: NodeConfig, role: Role) -> Iterator[Finding]:
    key, addresses = "node.coordinator", str(config.node.coordinator)
    if ROLES[role].is_hub:
        section: Any = config.roles[role]
        key, addresses = f"{role}.listen", section.listen
    if not all(is_loopback(split_address(each.strip())[0]) for each in addresses.split(",")):
        raise ConfigError(
            key=key,
            value=addresses,
            source="the configuration",
            rule="TLS is off, and this is not loopback: anyone could join, read and publish",
            fix="Set node.tls = true, or use 127.0.0.1.",
        )
    yield Finding("loopback", Grade.OK, f"TLS is off, and {addresses} is this machine alone")
