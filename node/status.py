"""``heterorl-node status``: who is in the run, how far behind, and how the run goes.

One call to the coordinator, as the operator; changes nothing.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.errors import ExitCode, RefusedError, StartupError
from node.identity.init_run import IDENTITY_DIRECTORY
from node.identity.peer import Peer
from node.identity.run_description import FILE_NAME, RunDescription
from node.identity.store import Identity, load_identity
from node.policy import PolicyVersion
from node.rollout import Verdict
from node.rpc.channel import ConnectionLost, Purpose, call, dial
from node.run import PeerStatus, Role, RunStatus, StepReport
from node.wire import run_status_from_wire

TIMEOUT_S: Final = 10.0
"""Deadline of the call: a handshake and two round trips on the worst link."""

REFRESH_S: Final = 2.0

_REFUSALS: Final = tuple(v for v in Verdict if v not in (Verdict.SPOOLED, Verdict.ACCEPTED, Verdict.TRAINED))

_BAD_PROMPTS_SHOWN: Final = 5
"""Enough to see what is wrong; --json has more."""

_STATE_STYLES: Final = {"live": "green", "joined": "cyan", "silent": "yellow", "left": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--state-dir", type=Path, required=True, help="directory that `init` made")
    parser.add_argument("--run-file", type=Path, help=f"the run's description; default STATE_DIR/{FILE_NAME}")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="where the coordinator is")
    parser.add_argument("--no-tls", action="store_true", help="for a coordinator on this machine without TLS")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--watch", action="store_true", help=f"again every {REFRESH_S:g} s until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 where the coordinator cannot be reached or refuses."""
    description = RunDescription.load(arguments.run_file or arguments.state_dir / FILE_NAME)
    caller = _caller(arguments.state_dir, description, no_tls=arguments.no_tls)
    show = _show_for_ever if arguments.watch else _show_once
    try:
        asyncio.run(show(arguments.coordinator, caller, as_json=arguments.json))
    except KeyboardInterrupt:
        return ExitCode.DRAINED
    except (ConnectionLost, RefusedError) as error:
        print(f"heterorl-node: no status from {arguments.coordinator}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.DRAINED


async def fetch_status(coordinator: str, caller: Identity | Peer) -> RunStatus:
    """Ask the coordinator at ``host:port`` for the state of the run.

    Raises:
        RefusedError, ConnectionLost: see ``node.rpc.channel``.
    """
    async with dial(coordinator, caller, purpose=Purpose.CONTROL, now=time.time()) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        response = await call(stub.GetStatus, membership_pb2.GetStatusRequest(), timeout_s=TIMEOUT_S)
    return run_status_from_wire(response)


def render(status: RunStatus) -> RenderableType:
    """Give the run's state for a terminal: a few lines on the run, a row for each peer."""
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
    return Group(_header(status), Text(), table)


def to_json(status: RunStatus) -> str:
    """Give the run's state as one JSON object; digests in hexadecimal."""
    return json.dumps(dataclasses.asdict(status), default=bytes.hex)


async def _show_once(coordinator: str, caller: Identity | Peer, *, as_json: bool) -> None:
    _print(await fetch_status(coordinator, caller), as_json=as_json)


async def _show_for_ever(coordinator: str, caller: Identity | Peer, *, as_json: bool) -> None:
    live = None if as_json else Live(auto_refresh=False)
    with live or contextlib.nullcontext():
        while True:
            try:
                status = await fetch_status(coordinator, caller)
            except ConnectionLost as lost:
                # A coordinator that restarts is worth watching for.
                print(f"heterorl-node: no status from {coordinator}: {lost}", file=sys.stderr)
            else:
                if live is None:
                    _print(status, as_json=True)
                else:
                    live.update(render(status), refresh=True)
            await asyncio.sleep(REFRESH_S)


def _print(status: RunStatus, *, as_json: bool) -> None:
    if as_json:
        print(to_json(status), flush=True)
    else:
        Console().print(render(status))


def _caller(state_dir: Path, description: RunDescription, *, no_tls: bool) -> Identity | Peer:
    if no_tls:
        return Peer(description.run_id, Role.OPERATOR, Role.OPERATOR.value)
    directory = state_dir / Role.OPERATOR / IDENTITY_DIRECTORY
    identity = load_identity(directory)
    if identity is None:
        raise StartupError(
            f"There is no operator's certificate in {directory}",
            fix="Give the directory that `heterorl-node init` made as --state-dir.",
        )
    return identity


def _header(status: RunStatus) -> Text:
    slots = ", ".join(f"{n} {state}" for state, n in status.slots.items() if n) or "none yet"
    verdicts = _counts(status.verdicts, Verdict) or "none yet"
    bad = [("bad" if place == 0 else "", line) for place, line in enumerate(_bad_prompts(status))]
    return Text("\n").join(
        Text.assemble((f"{name:10}", "bold"), value)
        for name, value in (
            ("run", f"{status.run_id}, learner epoch {status.learner_epoch}"),
            ("head", f"version {_number(status.head)}"),
            ("step", _step(status.step)),
            ("slots", slots),
            ("groups", verdicts),
            ("room", f"{status.capacity_groups} groups, bound by {status.capacity_bound}"),
            *bad,
        )
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
        Text("".join(filter(str.isprintable, peer.waits_for))),
    )


def _counts(verdicts: dict[str, int], shown: Iterable[Verdict]) -> str:
    return ", ".join(f"{verdicts[v]} {v}" for v in shown if verdicts.get(v))


def _number(version: PolicyVersion | None) -> str:
    return "-" if version is None else str(version.number)
