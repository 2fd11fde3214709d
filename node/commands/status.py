"""``heterorl-node status``: who is in the run, how far behind, and how the run goes.

One call to the coordinator, as an operator; changes nothing there. An operator's certificate is made
by `init` or, on any other machine, got for a token the first time.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.clock import Clock, SystemClock
from node.enrolment.enrolment_client import enrol_with_token
from node.enrolment.init_run import IDENTITY_DIRECTORY
from node.enrolment.token_file import how_to_get_a_token
from node.errors import ExitCode, RefusedError, StartupError
from node.identity.files import cannot_make
from node.identity.identity_checks import check_own
from node.identity.identity_store import Identity, load_identity
from node.identity.peer import Peer
from node.identity.run_description import FILE_NAME, RunDescription
from node.policy import PolicyVersion
from node.rollout import Verdict
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT, check_target
from node.rpc.channel import ConnectionLost, Purpose, call, dial
from node.rpc.clock_comparison import comparison_with
from node.run import PeerStatus, Role, RunStatus, StepReport
from node.wire import run_status_from_wire

TIMEOUT_S: Final = 10.0
"""Deadline of the call: a handshake and two round trips on the worst link."""

REFRESH_S: Final = 2.0

SHOW_TWINS_S: Final = 120.0
"""How long a process that was refused is shown: several of its retries, which are up to 30 s apart."""

CLOCKS_APART_S: Final = 60.0
"""From here on a clock is shown as off: beyond any line's delay, far from what certificates allow for."""

EXAMPLE: Final = """\
  on the coordinator's machine:
    heterorl-node status --state-dir runs/first --coordinator 127.0.0.1:7700 --watch
  on any other, with run.json copied there, and once a token that was made on the coordinator's by
  `heterorl-node token runs/first --role operator --address hub.example.org:7701 --out operator.token`:
    heterorl-node status --state-dir ~/first --run-file run.json --token-file operator.token \\
      --coordinator hub.example.org:7700
"""

_PIPE_COLUMNS: Final = 1 << 16
"""Wider than any line: 11 columns of at most some hundred characters."""

_REFUSALS: Final = tuple(v for v in Verdict if v not in (Verdict.SPOOLED, Verdict.ACCEPTED, Verdict.TRAINED))

_BAD_PROMPTS_SHOWN: Final = 5
"""Enough to see what is wrong; --json has more."""

_STATE_STYLES: Final = {"live": "green", "joined": "cyan", "silent": "yellow", "left": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="where the operator's certificate is: the directory that `init` made, or on any other machine "
        "a directory of your own, where --token-file puts it",
    )
    parser.add_argument(
        "--run-file", type=Path, metavar="FILE", help=f"the run's description; default: DIR/{FILE_NAME}"
    )
    parser.add_argument(
        "--coordinator",
        required=True,
        metavar="HOST:PORT",
        help="the coordinator's members port (coordinator.listen); there is no default port, since a "
        f"coordinator has two: {MEMBERS_PORT} for members and {ENROLMENT_PORT} for enrolment, by default",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a token of `heterorl-node token --role operator`: spent the first time, then not needed",
    )
    parser.add_argument("--no-tls", action="store_true", help="for a coordinator on this machine without TLS")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--watch", action="store_true", help=f"again every {REFRESH_S:g} s until Ctrl-C")


def run(arguments: argparse.Namespace, *, clock: Clock | None = None) -> int:
    """Run the command; 1 where the coordinator cannot be reached or refuses."""
    clock = clock or SystemClock()
    check_target(arguments.coordinator, flag="--coordinator", example_port=MEMBERS_PORT)
    description = RunDescription.load(arguments.run_file or arguments.state_dir / FILE_NAME)
    try:
        return asyncio.run(_answer(arguments, description, clock=clock))
    except KeyboardInterrupt:
        return ExitCode.DRAINED


async def _answer(arguments: argparse.Namespace, description: RunDescription, *, clock: Clock) -> ExitCode:
    coordinator = arguments.coordinator
    caller = await _caller(arguments, description, now=clock.now())
    show = _show_for_ever if arguments.watch else _show_once
    try:
        await show(coordinator, caller, as_json=arguments.json, clock=clock)
    except (ConnectionLost, RefusedError) as error:
        comparison = comparison_with(
            coordinator, caller if isinstance(caller, Identity) else None, clock=clock
        )
        finding = None if comparison is None else await comparison.after(error)
        print(f"heterorl-node: no status from {coordinator}: {finding or error}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.DRAINED


async def fetch_status(coordinator: str, caller: Identity | Peer, *, clock: Clock | None = None) -> RunStatus:
    """Ask the coordinator at ``host:port`` for the state of the run.

    Raises:
        RefusedError, ConnectionLost: see ``node.rpc.channel``.
    """
    now = (clock or SystemClock()).now()
    async with dial(coordinator, caller, purpose=Purpose.CONTROL, now=now) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        response = await call(stub.GetStatus, membership_pb2.GetStatusRequest(), timeout_s=TIMEOUT_S)
    return run_status_from_wire(response)


def render(status: RunStatus) -> RenderableType:
    """Return the run's state for a terminal: a few lines on the run, a row for each peer."""
    # One space between columns: the table fits a terminal of 80.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("node", "role", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("holds", "behind", "lag s", "seen s", "stale", "trained"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("refused")
    table.add_column("waits for")
    for peer in status.peers:
        table.add_row(*_row(peer))
    return Group(_header(status), Text(), table, *_twins(status.peers))


def to_json(status: RunStatus) -> str:
    """Return the run's state as one JSON object; digests in hexadecimal."""
    return json.dumps(dataclasses.asdict(status), default=bytes.hex)


async def _show_once(coordinator: str, caller: Identity | Peer, *, as_json: bool, clock: Clock) -> None:
    _print(await fetch_status(coordinator, caller, clock=clock), as_json=as_json)


async def _show_for_ever(coordinator: str, caller: Identity | Peer, *, as_json: bool, clock: Clock) -> None:
    is_live = sys.stdout.isatty() and not as_json
    live = Live(auto_refresh=False) if is_live else None
    with live or contextlib.nullcontext():
        while True:
            try:
                status = await fetch_status(coordinator, caller, clock=clock)
            except ConnectionLost as lost:
                # A coordinator that restarts is worth watching for.
                print(f"heterorl-node: no status from {coordinator}: {lost}", file=sys.stderr)
            else:
                if live is None:
                    _print(status, as_json=as_json)
                else:
                    live.update(render(status), refresh=True)
            await asyncio.sleep(REFRESH_S)


def _print(status: RunStatus, *, as_json: bool) -> None:
    if as_json:
        print(to_json(status), flush=True)
    else:
        # A pipe has no width: whoever reads it wants whole lines.
        Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(render(status))


async def _caller(
    arguments: argparse.Namespace, description: RunDescription, *, now: float
) -> Identity | Peer:
    if arguments.no_tls:
        return Peer(description.run_id, Role.OPERATOR, Role.OPERATOR.value)
    directory = arguments.state_dir / Role.OPERATOR / IDENTITY_DIRECTORY
    identity = load_identity(directory)
    if identity is not None:
        check_own(identity, description, Role.OPERATOR, now)
        return identity
    if arguments.token_file is None:
        raise StartupError(
            f"There is no operator's certificate in {directory}",
            fix="Where the coordinator runs, --state-dir is the directory that `heterorl-node init` made. "
            f"Anywhere else: {how_to_get_a_token(Role.OPERATOR)}, and name it once with --token-file.",
        )
    try:
        identity = await enrol_with_token(
            arguments.token_file,
            run=description,
            role=Role.OPERATOR,
            node_id=None,
            directory=directory,
            now=now,
            warn=_say,
            patience_s=TIMEOUT_S,
        )
    except OSError as error:
        raise cannot_make(directory, error, fix="Choose another --state-dir.") from error
    _say(
        f"enrolled as {identity.node_id}: the certificate is in {directory}, the token is spent, and "
        "--token-file may be left out from now on"
    )
    return identity


def _say(sentence: str) -> None:
    print(f"heterorl-node: {sentence}", file=sys.stderr)


def _header(status: RunStatus) -> Text:
    slots = ", ".join(f"{n} {state}" for state, n in status.slots.items() if n) or "none yet"
    verdicts = _counts(status.verdicts, Verdict) or "none yet"
    return Text("\n").join(
        Text.assemble((f"{name:10}", "bold"), value)
        for name, value in (
            ("run", f"{status.run_id}, learner epoch {status.learner_epoch}"),
            ("head", f"version {_number(status.head)}"),
            ("step", _step(status.step)),
            ("slots", slots),
            ("groups", verdicts),
            ("ledger", _ledger(status.ledger_gap)),
            ("room", f"{status.capacity_groups} groups, bound by {status.capacity_bound}"),
            ("clocks", _clocks(status.peers)),
            ("bad", f"\n{'':10}".join(_bad_prompts(status))),
        )
        if value
    )


def _ledger(gap: str) -> Text:
    """Return what the ledger lacks, as a warning; empty where nothing is known to be missing."""
    return Text(f"behind: {_printable(gap)}" if gap else "", "bold red")


def _clocks(peers: Iterable[PeerStatus]) -> str:
    """Return whose clock is far from the coordinator's; empty where nobody's is."""
    return ", ".join(
        f"{peer.node_id} is {abs(peer.clock_offset_s):.0f} s "
        + ("behind" if peer.clock_offset_s > 0 else "ahead")
        for peer in peers
        if abs(peer.clock_offset_s) >= CLOCKS_APART_S
    )


def _bad_prompts(status: RunStatus) -> Iterator[str]:
    """Yield a line on the prompts that nobody could answer, and one on each of the newest."""
    if not status.bad_prompts:
        return
    of = f" of {status.prompts}" if status.prompts else ""
    yield f"{status.bad_prompts_total}{of} prompts could not be answered and are passed over for a while"
    for bad in status.bad_prompts[:_BAD_PROMPTS_SHOWN]:
        retry_s = bad.retry_at_s - status.now_s
        again = f"tried again in {retry_s:.0f} s" if retry_s > 0 else "due to be tried again"
        times = "once" if bad.times == 1 else f"{bad.times} times"
        detail = "".join(filter(str.isprintable, bad.detail))
        yield f"  prompt {bad.prompt_index}: {bad.reason} {times}, {again}{': ' if detail else ''}{detail}"
    if status.bad_prompts_total > _BAD_PROMPTS_SHOWN:
        yield f"  and {status.bad_prompts_total - _BAD_PROMPTS_SHOWN} more; --json has the newest 50"


def _step(step: StepReport | None) -> str:
    if step is None:
        return "none yet"
    return (
        f"{step.version}: reward {step.reward_mean:.3f}, KL {step.kl_nats:.4f}, ESS {step.ess_ratio:.2f}, "
        f"staleness {step.staleness_mean_versions:.1f} mean, {step.staleness_max_versions} max, "
        f"{step.step_s:.2f} s"
    )


def _row(peer: PeerStatus) -> tuple[Text, ...]:
    has_groups = bool(peer.verdicts.get(Verdict.TRAINED))
    return (
        Text(peer.node_id),
        Text(peer.role),
        Text(peer.state, style=_STATE_STYLES.get(peer.state, "")),
        Text(_number(peer.held)),
        Text(str(peer.version_lag_versions)),
        Text(f"{peer.lag_s:.1f}"),
        Text(f"{peer.last_seen_s:.1f}"),
        Text(f"{peer.staleness_mean_versions:.2f}" if has_groups else "-"),
        Text(str(peer.verdicts.get(Verdict.TRAINED, 0)) if peer.role is Role.SAMPLER else "-"),
        Text(_counts(peer.verdicts, _REFUSALS)),
        # From the peer itself: no control characters reach the terminal.
        Text(_printable(peer.waits_for)),
    )


def _twins(peers: Iterable[PeerStatus]) -> Iterable[Text]:
    """Say of which peers a second process was kept out lately."""
    for peer in peers:
        if peer.refused_twins and peer.refused_twin_s <= SHOW_TWINS_S:
            yield Text(
                f"{peer.node_id}: another process of this name was refused {peer.refused_twins} times, last "
                f"{peer.refused_twin_s:.0f} s ago; stop one of the two",
                style="yellow",
            )


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text))


def _counts(verdicts: dict[str, int], shown: Iterable[Verdict]) -> str:
    return ", ".join(f"{verdicts[v]} {v}" for v in shown if verdicts.get(v))


def _number(version: PolicyVersion | None) -> str:
    return "-" if version is None else str(version.number)
