"""``heterorl-node doctor``: which layer fails between this machine and a working run, and what mends it."""

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from node.checks.check import EVERYTHING, Check, Finding, examine
from node.checks.machine_checks import machine_checks
from node.checks.start_checks import start_checks
from node.commands.config_command import add_configuration_arguments, resolve
from node.commands.doctor.findings import show
from node.commands.doctor.way_checks import Caller, way_checks
from node.errors import COMMAND_LINE, ConfigError, NotReadyError, StartupError
from node.exit_code import ExitCode
from node.identity.identity_store import IDENTITY_DIRECTORY, Identity, load_identity
from node.identity.run_description import FILE_NAME as RUN_FILE
from node.identity.run_description import RunDescription
from node.process.role_context import in_order
from node.rpc.address import split_targets
from node.values.roles import Role

EXAMPLE: Final = """\
  this machine and the way to a coordinator, before there is a certificate:
    heterorl-node doctor --coordinator hub.example.org:7700
  everything, with the flags that the daemon is started with:
    heterorl-node doctor --role sampler --config ~/.local/state/heterorl-node/two/sampler.toml
Exit code 1: something fails. A warning alone is 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node doctor``."""
    add_configuration_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print findings as they come; return 1 if something fails."""
    try:
        checks = _configured(arguments) if arguments.roles else _unconfigured(arguments)
    except NotReadyError as error:
        findings = iter([Finding.of_fault("configuration", fault) for fault in error.faults])
    else:
        findings = examine(checks, needs=EVERYTHING)
    return ExitCode.FAILED if show(findings, as_json=arguments.json) else ExitCode.DRAINED


def _configured(arguments: argparse.Namespace) -> list[Check]:
    """Return the checks of a daemon with these flags. Raises NotReadyError: it is misconfigured."""
    config, roles = resolve(arguments).config, in_order(arguments.roles)
    node = config.node
    return [
        *start_checks(config, roles, now=time.time()),
        *_surroundings(node.state_dir, node.run_file, roles, node.coordinator),
    ]


def _unconfigured(arguments: argparse.Namespace) -> list[Check]:
    """Return the checks of this machine and of the way to a coordinator."""
    given = {key: getattr(arguments, flag) for flag, key in (("--state-dir", "state"), ("--run-file", "run"))}
    state_dir = Path(given["state"] or ".")
    run_file = Path(given["run"] or state_dir / RUN_FILE)
    coordinator = getattr(arguments, "--coordinator")
    if coordinator is not None:
        try:
            split_targets(coordinator)
        except ValueError as error:
            raise ConfigError(
                key="--coordinator",
                value=coordinator,
                source=COMMAND_LINE,
                rule=str(error),
                fix="Correct it.",
            ) from error
    return list(_surroundings(state_dir, run_file, (), coordinator))


def _surroundings(
    state_dir: Path, run_file: Path, roles: Sequence[Role], coordinator: str | None
) -> Iterator[Check]:
    yield from machine_checks(state_dir, roles)
    run, identity = None, None
    with contextlib.suppress(StartupError):  # a fault of the configuration, or not asked for
        run = RunDescription.load(run_file)
        identity = _identity(state_dir, roles)
    yield from way_checks(coordinator, Caller(state_dir, run, identity))


def _identity(state_dir: Path, roles: Sequence[Role]) -> Identity | None:
    """Return a certificate to call with: of these roles, or of any that has one here."""
    for role in roles or Role:
        if role is not Role.COORDINATOR and (found := load_identity(state_dir / role / IDENTITY_DIRECTORY)):
            return found
    return None
