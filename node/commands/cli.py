"""``heterorl-node``: arguments -> configuration -> roles.

Nothing heavy is imported before the arguments and the configuration are known to be right: --help and the
message for a wrong value take a fraction of a second on a machine that has torch.
"""

import argparse
import difflib
import importlib
import io
import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from node.commands.config_command import add_configuration_arguments, print_resolved, resolve
from node.commands.doctor.findings import faults_of, show
from node.coordinator.work.orders.verbs import VERBS
from node.errors import COMMAND_LINE, ConfigError, HeteroRLError, NotReadyError, StartupError
from node.exit_code import ExitCode, exit_code_of_faults
from node.process.role_context import in_order
from node.system.descriptors import fill_standard_descriptors
from node.system.extras import extra_of, install_line
from node.text.visible_text import visible
from node.values.roles import ROLES

COMMANDS: Final = {
    "init": ("node.commands.init_command", "make a new run: its keys and certificates"),
    "try": (
        "sampler.try_command",
        "ask the base model a task's first prompts and grade them, before a run exists",
    ),
    "token": ("node.commands.joining.token_command", "make, list or cancel tokens that let new peers in"),
    "join": (
        "node.commands.joining.join_command",
        "make this machine a sampler or relay of a run, with a token",
    ),
    "ledger": (
        "node.commands.ledger_command",
        "back up, restore, check or export the coordinator's ledger",
    ),
    **{verb.name: ("node.commands.order_command", verb.help) for verb in VERBS.values()},
    "status": ("node.commands.status.status_command", "show who is in the run and how far behind"),
    "doctor": (
        "node.commands.doctor.doctor_command",
        "say which layer fails here, from DNS to the GPU, and the fix",
    ),
    "why-stalled": (
        "node.commands.status.why_stalled_command",
        "say who waits for whom, and what to do about it",
    ),
    "plan": (
        "learner.plan_command",
        "show which layouts of a learner's ranks fit, how fast, how far samplers lag",
    ),
    "export": ("learner.export_command", "write a version as a model directory, named as the base model is"),
    "report": (
        "node.commands.report_command",
        "write the page of a run, with its curves, as one HTML file",
    ),
    "samples": ("learner.records.samples_command", "show what the model writes, with rewards"),
    "config": (
        "node.commands.config_command",
        "show every key: its value, who set it, what it means; start nothing",
    ),
    "completion": ("node.commands.completion_command", "print what bash, zsh or fish complete, as a script"),
}
"""Command -> its module, see ``command_of``, and its description."""

REMOVED: Final = {
    "simulate": "Nothing replaces it. `make simulate` in a checkout looks for faults in simulated runs.",
}
"""Command that 0.4 removed -> what to do now."""

_EXAMPLE: Final = """\
example:
  heterorl-node --role sampler --config sampler.toml --dry-run
  heterorl-node --role sampler --config sampler.toml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    fill_standard_descriptors()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # its descriptor is another file's by now, one without positions
                stream.reconfigure(errors="backslashreplace")  # the locale may lack others' characters
    # gRPC's own lines are not events of the log; our errors carry what they say. grpc reads this at import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # The resolver of all other programs. gRPC's own asks the name servers, for a minute where they are gone,
    # about names that /etc/hosts has.
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
    if argv and argv[0] in COMMANDS:
        return _reporting_errors(lambda: _run_command(argv[0], argv[1:]))
    if argv and not argv[0].startswith("-"):
        return _reporting_errors(lambda: _refuse_command(argv[0]))
    return _reporting_errors(lambda: _run_daemon(argv), is_start=True)


def command_of(name: str) -> Any:
    """Return what has ``add_arguments(parser)`` and ``run(arguments) -> int`` of a command: its module, or
    what the module makes of the row of a verb."""
    module = importlib.import_module(COMMANDS[name][0])
    return module.OrderCommand(VERBS[name]) if name in VERBS else module


def _run_command(name: str, argv: Sequence[str]) -> int:
    module, (_, description) = command_of(name), COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"heterorl-node {name}",
        description=f"{description}.",
        epilog=f"example:\n{module.EXAMPLE}" if hasattr(module, "EXAMPLE") else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        exit_code: int = module.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise
        return ExitCode.DRAINED
    return exit_code


def _has_lost_its_reader() -> bool:
    """Return whether what read standard output, such as `head`, has ended; then nothing more is written."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _refuse_command(name: str) -> int:
    rule = "there is no such command"
    if name in REMOVED:
        rule, fix = f"{name} was removed in 0.4", REMOVED[name]
    elif name in ROLES:
        fix = f"A role is started by a flag: heterorl-node --role {name}"
    elif close := difflib.get_close_matches(name, COMMANDS, n=1):
        fix = f"Did you mean {close[0]}? heterorl-node {close[0]} --help"
    else:
        fix = f"Commands are {', '.join(COMMANDS)}; a role is started by --role. See heterorl-node --help"
    raise ConfigError(key="command", value=name, source=COMMAND_LINE, rule=rule, fix=fix)


def _run_daemon(argv: Sequence[str]) -> int:
    parser = daemon_parser()
    arguments = parser.parse_args(argv)
    if not arguments.roles:
        parser.error("choose what this process does with --role, or a command: " + ", ".join(COMMANDS))
    resolved = resolve(arguments)
    from node.checks.check import DRY_RUN, START, examine, require
    from node.checks.start_checks import start_checks

    roles = in_order(arguments.roles)
    checks = start_checks(resolved.config, roles, now=time.time(), told=_report)
    if arguments.dry_run:
        print_resolved(resolved)
        print()
        if failed := show(examine(checks, needs=DRY_RUN)):
            return exit_code_of_faults(faults_of(failed))
        print("nothing is wrong")
        return ExitCode.DRAINED
    require(checks, needs=START)
    # uvloop starts children by fork(), in which gRPC's fork handlers crash now and then. We fork only to
    # exec, which needs none of them. grpc reads this when it is imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    importlib.import_module("node.rpc.proxy").spare_private_networks(os.environ)
    telemetry = resolved.config.telemetry
    importlib.import_module("node.process.process_end").PROCESS_END.register()
    logs = importlib.import_module("node.telemetry.logging")
    logs.configure_process_logging(
        log_format=telemetry.log_format, level=telemetry.log_level, roles=arguments.roles
    )
    bootstrap = importlib.import_module("node.process.bootstrap")
    exit_code: int = bootstrap.run(resolved, roles=roles)
    return exit_code


def daemon_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line without a command."""
    width = max(map(len, COMMANDS))
    commands = "".join(f"  {name:{width}}  {text}\n" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="heterorl-node",
        description="One daemon, six roles: reinforcement learning of language models across the Internet.",
        usage="heterorl-node --role ROLE [--role ROLE] [--config FILE] ... | heterorl-node COMMAND ...",
        epilog=f"commands (each has its own --help):\n{commands}\n{_exit_codes()}\n{_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_configuration_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the configuration, check it and all files it names, and start nothing",
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    return parser


def _exit_codes() -> str:
    lines = (
        textwrap.fill(code.meaning, 110, initial_indent=f"  {code:d}  ", subsequent_indent=" " * 5)
        for code in ExitCode
    )
    return "\n".join(["exit codes:", *lines, ""])


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version  # 20 ms that --help does not need

        print(f"heterorl-node {version('heterorl-node')}")
        parser.exit()


def _reporting_errors(command: Callable[[], int], *, is_start: bool = False) -> int:
    """Report our own errors on standard error; return the exit code. ``is_start``: of a daemon."""
    try:
        return command()
    except (StartupError, ConfigError) as error:
        return _report_faults([error], is_start=is_start)
    except NotReadyError as error:
        return _report_faults(error.faults, is_start=is_start)
    except HeteroRLError as error:
        _report(str(error))
        return ExitCode.FAILED
    except ModuleNotFoundError as error:
        if (extra := extra_of(error.name or "")) is None:
            raise
        _report(f"this needs the package {error.name}, which is not installed", fix=f"{install_line(extra)}.")
        return ExitCode.CONFIGURATION


def _report_faults(faults: Sequence[StartupError | ConfigError], *, is_start: bool) -> ExitCode:
    for fault in faults:
        if isinstance(fault, StartupError):
            _report(f"could not start: {fault.what}" if is_start else fault.what, fix=fault.fix)
            continue
        value = "" if fault.value is None else f" = {fault.value!r}"
        where = "" if fault.source == COMMAND_LINE else f" (from {fault.source})"
        _report(f"{fault.key}{value}{where}: {fault.rule}", fix=fault.fix)
    return exit_code_of_faults(faults)


def _report(what: str, *, fix: str = "") -> None:
    lines = (f"heterorl-node: {what}", *filter(None, [fix and f"  {fix}"]))
    print(*map(visible, lines), sep="\n", file=sys.stderr)  # hubs and files of others have a part in it
