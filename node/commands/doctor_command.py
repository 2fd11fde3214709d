"""``heterorl-node doctor``: which layer fails between this machine and a working run, and what mends it."""

import argparse
import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Final

from node.commands.checkup import Finding, Grade, Patient, machine, way
from node.commands.config_command import add_configuration_arguments, resolve
from node.commands.terminal import printable
from node.errors import COMMAND_LINE, ConfigError, NotReadyError, StartupError
from node.exit_code import ExitCode
from node.identity.identity_store import IDENTITY_DIRECTORY, Identity, load_identity
from node.identity.run_description import FILE_NAME as RUN_FILE
from node.identity.run_description import RunDescription
from node.process.preflight import check_everything, in_order
from node.rpc.address import split_targets
from node.run import Role

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
    return asyncio.run(_examine(arguments))


async def _examine(arguments: argparse.Namespace) -> ExitCode:
    exit_code = ExitCode.DRAINED

    def show(finding: Finding) -> None:
        nonlocal exit_code
        if finding.grade is Grade.FAIL:
            exit_code = ExitCode.FAILED
        if arguments.json:
            print(json.dumps(dataclasses.asdict(finding)), flush=True)
        else:
            print(f"{finding.grade:5} {finding.layer:13} {printable(finding.what)}", flush=True)
            if finding.fix:
                print(f"{'':20}-> {printable(finding.fix)}", flush=True)

    patient, findings = _configured(arguments) if arguments.roles else (_unconfigured(arguments), [])
    for finding in findings:
        show(finding)
    if patient is None:
        return exit_code
    for finding in machine(patient):
        show(finding)
    async for finding in way(patient):
        show(finding)
    return exit_code


def _configured(arguments: argparse.Namespace) -> tuple[Patient | None, list[Finding]]:
    """Return what the daemon would start with, and what its dry run finds. None: it is misconfigured."""
    findings: list[Finding] = []
    try:
        config, roles = resolve(arguments).config, in_order(arguments.roles)
    except NotReadyError as error:
        return None, [_fault(fault) for fault in error.faults]

    def warn(text: str) -> None:
        findings.append(Finding("configuration", Grade.WARN, text))

    try:
        check_everything(config, roles, now=time.time(), warn=warn)
    except NotReadyError as error:
        findings += map(_fault, error.faults)
    else:
        findings.append(Finding("configuration", Grade.OK, "all that a start needs is there"))
    node = config.node
    patient = _patient(node.state_dir, node.run_file, frozenset(roles), node.coordinator)
    return patient, findings


def _unconfigured(arguments: argparse.Namespace) -> Patient:
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
    return _patient(state_dir, run_file, frozenset(), coordinator)


def _patient(state_dir: Path, run_file: Path, roles: frozenset[Role], coordinator: str | None) -> Patient:
    run, identity = None, None
    try:
        run = RunDescription.load(run_file)
        identity = _identity(state_dir, roles)
    except StartupError:
        pass  # a fault of the configuration, or not asked for
    return Patient(state_dir, roles, coordinator, run, identity)


def _identity(state_dir: Path, roles: frozenset[Role]) -> Identity | None:
    """Return a certificate to call with: of these roles, or of any that has one here."""
    for role in roles or Role:
        if role is not Role.COORDINATOR and (found := load_identity(state_dir / role / IDENTITY_DIRECTORY)):
            return found
    return None


def _fault(fault: StartupError | ConfigError) -> Finding:
    what = fault.what if isinstance(fault, StartupError) else f"{fault.key} = {fault.value!r}: {fault.rule}"
    return Finding("configuration", Grade.FAIL, what, fault.fix)
