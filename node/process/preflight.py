"""Checks before a start: files, permissions, certificates, tokens, models. Every fault is reported at once.

    configuration is valid (``node.config``) -> these checks -> the roles are built

``--dry-run`` makes every check. A real start makes only those that would otherwise come after torch is loaded
or a token is spent; the others are made again, one by one, where they matter.

Not checked: whether a port is free (a running daemon has its own ports), whether anyone can be reached,
whether the device exists, and what only loading the weights can show.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from node import descriptors
from node.clock import moment
from node.config.settings import NodeConfig, NodeSection
from node.enrolment.authority import present_authority
from node.enrolment.init_run import AUTHORITY_DIRECTORY, IDENTITY_DIRECTORY, SIGNING_KEY_FILE
from node.enrolment.tokens import how_to_get_a_token, usable_token
from node.errors import ConfigError, NotReadyError, StartupError
from node.identity.files import cannot_make, cannot_read
from node.identity.identity_store import identity_on_disk
from node.identity.run_description import RunDescription
from node.identity.signatures import SigningKey
from node.process.role_context import ROLE_MODULES
from node.rpc.address import is_loopback, split_address
from node.run import Role
from node.weights.format.model_files import StoredDtypes

_RELAYED_PEERS: Final = 256

Check = Callable[[], object]
"""Raises a StartupError or ConfigError, or returns."""


def in_order(names: Iterable[str]) -> tuple[Role, ...]:
    """Return each role once, in the order in which they start."""
    wanted = set(names)
    return tuple(Role(name) for name in ROLE_MODULES if name in wanted)


def check_before_torch(config: NodeConfig, roles: Iterable[Role]) -> None:
    """Check the model directories and packages of roles as far as possible without torch.

    Raises NotReadyError: with every fault.
    """
    _raise_all(_installed_checks(config, tuple(roles)))


def check_everything(
    config: NodeConfig,
    roles: Iterable[Role],
    *,
    now: float,
    warn: Callable[[str], None],
    told: Callable[[str], None] = lambda text: None,
) -> str:
    """Check everything that a start of ``roles`` needs, change nothing; return what was checked.

    Args:
        warn: Called with a sentence about anything that works and should be changed all the same.
        told: Called now and then with how far a long check is.
    Raises:
        NotReadyError: with every fault.
    """
    roles = tuple(roles)
    said: list[str] = []
    if (scarcity := too_few_descriptors(config, roles)) is not None:
        warn(scarcity)
    checks = [
        *_checks_of_run(config, roles, now=now, warn=warn),
        *_installed_checks(config, roles),
        *_data_checks(config, roles, warn, told, said),
        *(section.check_code for _, section in _sections(config, roles, having="check_code")),
    ]
    _raise_all(checks)
    checked = ["the configuration", "state directories", "run file", *(["keys"] if config.node.tls else [])]
    if any(path is not None for path in _model_dirs(config, roles)):
        checked.append("models")
    return f"checked {', '.join([*checked, 'packages', *said])}: nothing is wrong"


def too_few_descriptors(config: NodeConfig, roles: Iterable[Role]) -> str | None:
    """Return a warning if a hub may not open enough files for the peers it expects; None if it may."""
    hubs = {Role.COORDINATOR, Role.RELAY} & set(roles)
    most = descriptors.hard_limit()
    room = descriptors.peers_with_room(most)
    expected, why = _RELAYED_PEERS, "a relay may serve"
    section: Any = config.coordinator
    if Role.COORDINATOR in hubs and section is not None:
        expected, why = section.concurrency_groups, "coordinator.concurrency_groups lets work at once"
    if not hubs or room >= expected:
        return None
    return (
        f"this process may have {most} files open, which is room for {room} peers with "
        f"{descriptors.CONNECTIONS_PER_PEER} connections each, and {why} {expected}. Raise the hard limit: "
        "LimitNOFILE of the systemd unit, `ulimit -Hn` of a shell, `--ulimit nofile` of a container"
    )


def _raise_all(checks: Iterable[Check]) -> None:
    found: dict[str, StartupError | ConfigError] = {}
    for check in checks:
        try:
            check()
        except (StartupError, ConfigError) as error:
            found.setdefault(str(error), error)  # two roles may share a directory
    if found:
        raise NotReadyError(tuple(found.values()))


def _checks_of_run(
    config: NodeConfig, roles: Sequence[Role], *, now: float, warn: Callable[[str], None]
) -> Iterator[Check]:
    """Yield the checks of state directories, identities and keys; those of the run only if it is known."""
    node = config.node
    for role in roles:
        yield partial(_check_state_dir, node.state_dir / role)
        if not node.tls:
            yield partial(_check_loopback, config, role)
    try:
        run = RunDescription.load(node.run_file)
    except StartupError:
        yield partial(RunDescription.load, node.run_file)
        return
    for role in roles if node.tls else ():
        yield partial(_check_identity, node, role, run, now=now, warn=warn)
    if node.tls and Role.COORDINATOR in roles:
        yield partial(present_authority, node.state_dir / Role.COORDINATOR / AUTHORITY_DIRECTORY)
    if Role.LEARNER in roles:
        yield partial(_check_signing_key, node.state_dir / Role.LEARNER, run)


def _sections(config: NodeConfig, roles: Iterable[Role], *, having: str) -> list[tuple[Role, Any]]:
    """Return the sections of roles whose model has an attribute: what a section needs is its own business."""
    sections = ((role, getattr(config, role)) for role in roles)
    return [(role, section) for role, section in sections if hasattr(section, having)]


def _installed_checks(config: NodeConfig, roles: Sequence[Role]) -> list[Check]:
    """Return the checks of what was put on this machine for the roles: models and packages."""
    packages = _sections(config, roles, having="needed_packages")
    return [
        *_model_checks(config, roles),
        *(needed.check for _, section in packages for needed in section.needed_packages),
    ]


def _model_checks(config: NodeConfig, roles: Sequence[Role]) -> list[Check]:
    models = ((role, section.model_dir) for role, section in _sections(config, roles, having="model_dir"))
    return [
        partial(_check_model, path, key=f"{role}.model_dir", needs_weights=role is not Role.VERIFIER)
        for role, path in models
        if path is not None
    ]


def _model_dirs(config: NodeConfig, roles: Iterable[Role]) -> list[Path | None]:
    return [section.model_dir for _, section in _sections(config, roles, having="model_dir")]


def _data_checks(
    config: NodeConfig,
    roles: Sequence[Role],
    warn: Callable[[str], None],
    told: Callable[[str], None],
    said: list[str],
) -> Iterator[Check]:
    """Yield the checks of data; one that passes adds what it checked to ``said``."""
    model_dir = next(filter(None, _model_dirs(config, roles)), None)
    for role, section in _sections(config, roles, having="data_paths"):
        paths = [partial(_check_path, key, path) for key, path in section.data_paths.items()]
        yield from paths
        packages = [needed.check for needed in section.needed_packages]
        needs = [*paths, *packages, *_model_checks(config, roles)]
        check = partial(section.check_data, model_dir, state_dir=config.node.state_dir / role, told=told)
        yield partial(_check_data, check, needs, warn=warn, said=said)


def _check_data(
    check_data: Callable[[], Any], needs: Iterable[Check], *, warn: Callable[[str], None], said: list[str]
) -> None:
    for check in needs:
        check()  # its fault is found by itself too, and counts once
    if (findings := check_data()) is not None:
        for warning in findings.warnings:
            warn(warning)
        said.append(findings.said)


def _check_path(key: str, path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        raise cannot_read(path, error, fix=f"Set {key} to a file on this machine.") from error


def _check_model(model_dir: Path, *, key: str, needs_weights: bool) -> None:
    weights = "model.safetensors (or its shards and their index) " if needs_weights else ""
    fix = (
        f"{key} is a directory on this machine with config.json, {weights}and tokenizer.json, as "
        "transformers saves them; a model of the Hub is downloaded there first."
    )
    try:
        names = {entry.name for entry in os.scandir(model_dir)}
    except OSError as error:
        raise cannot_read(model_dir, error, fix=fix) from error
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if needs_weights and not names & {"model.safetensors", "model.safetensors.index.json"}:
        missing.insert(1, "model.safetensors")
    if missing:
        raise StartupError(f"{model_dir} has no {', no '.join(missing)}", fix=fix)
    try:
        for name in ("config.json", "tokenizer.json"):
            if not isinstance(json.loads((model_dir / name).read_bytes()), dict):
                raise StartupError(f"{model_dir / name} is not a JSON object", fix=fix)
        if needs_weights:
            StoredDtypes.of(model_dir)
    except OSError as error:
        raise cannot_read(Path(error.filename or model_dir), error, fix=fix) from error
    except ValueError as error:
        raise StartupError(f"{model_dir} is damaged: {str(error).splitlines()[0]}", fix=fix) from error


def _check_state_dir(directory: Path) -> None:
    fix = "Set node.state_dir to another directory."
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise cannot_make(directory, NotADirectoryError(20, f"{there} is not a directory"), fix=fix)
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise cannot_make(directory, PermissionError(13, "Permission denied"), fix=fix)


def _check_identity(
    node: NodeSection, role: Role, run: RunDescription, *, now: float, warn: Callable[[str], None]
) -> None:
    directory = node.state_dir / role / IDENTITY_DIRECTORY
    if identity_on_disk(directory, role=role, run=run, node_id=node.node_id, now=now) is not None:
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
        warn(found.exposure)


def _check_signing_key(state_dir: Path, run: RunDescription) -> None:
    path = state_dir / SIGNING_KEY_FILE
    key = SigningKey.load(path)
    if key.public_key != run.learner_public_key:
        raise StartupError(
            f"{path} is not the key that run {run.run_id} is signed with",
            fix="Use signing key and run.json of the same `heterorl-node init`.",
        )


def _check_loopback(config: NodeConfig, role: Role) -> None:
    section: Any = getattr(config, role)
    is_hub = role in (Role.COORDINATOR, Role.RELAY)
    key, addresses = (
        (f"{role}.listen", section.listen) if is_hub else ("node.coordinator", str(config.node.coordinator))
    )
    if not all(is_loopback(split_address(each.strip())[0]) for each in addresses.split(",")):
        raise ConfigError(
            key=key,
            value=addresses,
            source="the configuration",
            rule="TLS is off, and this is not loopback: anyone could join, read and publish",
            fix="Set node.tls = true, or use 127.0.0.1.",
        )
