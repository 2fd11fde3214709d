"""``heterorl-node status``: what the run does and waits for, what is unusual, and a page of its peers.

One call to the coordinator as an operator, which changes nothing there. `init` makes an operator's
certificate; on any other machine the first call obtains one with a token.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from rich.live import Live

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.commands.status.status_view import render
from node.commands.terminal import console, target
from node.errors import Reason, RefusedError
from node.exit_code import ExitCode
from node.identity.files import cannot_make
from node.identity.identity_store import IDENTITY_DIRECTORY, Identity, identity_on_disk
from node.identity.peer import Peer
from node.identity.run_description import FILE_NAME, RunDescription
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT, split_targets
from node.rpc.call_ends import ConnectionLost, call
from node.rpc.channel import Purpose, dial
from node.rpc.clock_comparison import compare_clocks
from node.system.clock import Clock, SystemClock
from node.text.visible_text import visible
from node.values.roles import MEMBER_ROLES, Role
from node.values.run import (
    MOST_PEERS_A_PAGE,
    PEER_ORDERS,
    PeerCount,
    PeerQuery,
    PeerStatus,
    RunStatus,
    SamplerStanding,
)
from node.wire.mapping import from_wire, known, optional_to_wire

TIMEOUT_S: Final = 10.0
"""Deadline of the call: a handshake and two round trips on the slowest link."""

_ASK_ANOTHER: Final = (Reason.STANDBY, Reason.DRAINING)
"""Refusals of a coordinator beside which another one leads."""

REFRESH_S: Final = 2.0

PEERS_SHOWN: Final = 50

_MOST_COUNT: Final = 1_000_000
_STATES: Final = ("joined", "live", "silent", "left", "revoked")
_ROLES: Final = tuple(role.value for role in MEMBER_ROLES)

EXAMPLE: Final = """\
  on the coordinator's machine:
    heterorl-node status --state-dir runs/first --coordinator 127.0.0.1:7700 --watch
  on any other, with run.json copied there, and once a token that was made on the coordinator's by
  `heterorl-node token runs/first --role operator --address hub.example.org:7701 --out operator.token`:
    heterorl-node status --state-dir ~/first --run-file run.json --token-file operator.token \\
      --coordinator hub.example.org:7700
  in a large fleet, the samplers that are furthest behind, or those that wait for the learner:
    heterorl-node status ... --role sampler --sort behind --limit 20
    heterorl-node status ... --waits-for learner --page 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node status``."""
    add_connection(parser)
    _add_query(parser)
    parser.add_argument("--watch", action="store_true", help=f"refresh every {REFRESH_S:g} s until Ctrl-C")


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add what a question to the coordinator takes: where it is, who asks, and how to answer."""
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
        type=target(MEMBERS_PORT, or_several=True),
        metavar="HOST:PORT",
        help="the coordinator's members port (coordinator.listen); of several, with commas between, the one "
        "that leads is asked; there is no default port, since a "
        f"coordinator has two: {MEMBERS_PORT} for members and {ENROLMENT_PORT} for enrolment, by default",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a token from `heterorl-node token --role operator`: used once, then not needed",
    )
    parser.add_argument("--no-tls", action="store_true", help="for a coordinator on this machine without TLS")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(arguments: argparse.Namespace, *, clock: Clock | None = None) -> int:
    """Run the command; return 1 if the coordinator cannot be reached or refuses."""
    return ask(arguments, partial(_show, arguments), clock=clock or SystemClock())


def ask(
    arguments: argparse.Namespace,
    show: Callable[[Identity | Peer, Clock], Awaitable[None]],
    *,
    clock: Clock,
) -> int:
    """Let ``show`` ask the coordinator as an operator; return 1 if it cannot be reached or refuses."""
    description = RunDescription.load(arguments.run_file or arguments.state_dir / FILE_NAME)
    try:
        return asyncio.run(_answer(arguments, description, show, clock=clock))
    except KeyboardInterrupt:
        return ExitCode.DRAINED


def _add_query(parser: argparse.ArgumentParser) -> None:
    peers = parser.add_argument_group("peers", "which peers to list, and in what order")
    peers.add_argument("--state", nargs="+", default=(), choices=_STATES, help="only in these")
    peers.add_argument("--role", nargs="+", default=(), choices=_ROLES, help="only of these")
    peers.add_argument(
        "--standing", nargs="+", default=(), choices=[one.value for one in SamplerStanding],
        help="only samplers in these",
    )  # fmt: skip
    peers.add_argument("--name", default="", metavar="TEXT", help="only peers with TEXT in their node id")
    peers.add_argument("--waits-for", default="", metavar="TEXT", help="only peers that wait for TEXT")
    peers.add_argument(
        "--sort", default="", choices=PEER_ORDERS,
        help="joined (the default) and name ascend; the others begin with the largest",
    )  # fmt: skip
    peers.add_argument("--reverse", action="store_true", help="the other way round")
    peers.add_argument(
        "--limit", type=_count, default=PEERS_SHOWN, metavar="N",
        help=f"peers to list, at most {MOST_PEERS_A_PAGE}; default: {PEERS_SHOWN}",
    )  # fmt: skip
    peers.add_argument("--page", type=_count, default=1, metavar="N", help="which so many; default: 1")


def query_of(arguments: argparse.Namespace) -> PeerQuery:
    """Return the peers that the command line asks for."""
    return PeerQuery(
        states=tuple(arguments.state),
        roles=tuple(arguments.role),
        standings=tuple(arguments.standing),
        name=arguments.name,
        waits_for=arguments.waits_for,
        sort_by=arguments.sort,
        is_reversed=arguments.reverse,
        offset=(arguments.page - 1) * arguments.limit,
        limit=arguments.limit,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_COUNT}")
    return int(text)


async def _answer(
    arguments: argparse.Namespace,
    description: RunDescription,
    show: Callable[[Identity | Peer, Clock], Awaitable[None]],
    *,
    clock: Clock,
) -> ExitCode:
    caller = await _caller(arguments, description, now=clock.now())
    try:
        await show(caller, clock)
    except (ConnectionLost, RefusedError) as error:
        identity = caller if isinstance(caller, Identity) else None
        finding = compare_clocks(error, identity, now=clock.now())
        _say(f"no status from {arguments.coordinator}: {finding or error}")
        return ExitCode.FAILED
    return ExitCode.DRAINED


async def fetch_status(
    coordinator: str, caller: Identity | Peer, *, query: PeerQuery | None = None, clock: Clock | None = None
) -> RunStatus:
    """Ask the coordinator at ``host:port`` for the state of the run and a page of peers; None: the first.

    Of several, with commas between, the first is asked that is there and leads.

    Raises RefusedError, ConnectionLost: see ``node.rpc.channel``; the latter where none of several leads.
    """
    addresses, failed = split_targets(coordinator), []
    for address in addresses:
        try:
            return await _status_from(address, caller, query=query, now=(clock or SystemClock()).now())
        except (RefusedError, ConnectionLost) as error:
            is_decided = isinstance(error, RefusedError) and error.reason not in _ASK_ANOTHER
            if len(addresses) == 1 or is_decided:
                raise
            failed.append(f"{address}: {error}")
    raise ConnectionLost("; ".join(failed))


async def _status_from(
    coordinator: str, caller: Identity | Peer, *, query: PeerQuery | None, now: float
) -> RunStatus:
    async with dial(coordinator, caller, purpose=Purpose.CONTROL, now=now) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        request = membership_pb2.GetStatusRequest(query=optional_to_wire(membership_pb2.PeerQuery, query))
        response = await call(stub.GetStatus, request, timeout_s=TIMEOUT_S)
    # Peers in roles of a later version are counted by that version's command.
    return from_wire(
        RunStatus,
        response,
        peers=tuple(from_wire(PeerStatus, one) for one in known(Role, response.peers, "role")),
        peer_counts=tuple(from_wire(PeerCount, one) for one in known(Role, response.peer_counts, "role")),
    )


def to_json(status: RunStatus) -> str:
    """Return the run's state as one JSON object; digests in hexadecimal."""
    return json.dumps(dataclasses.asdict(status), default=bytes.hex)


async def _show(arguments: argparse.Namespace, caller: Identity | Peer, clock: Clock) -> None:
    """Print the state of the run: once, or again and again where it is watched."""
    is_live = arguments.watch and sys.stdout.isatty() and not arguments.json
    live = Live(auto_refresh=False) if is_live else None
    with live or contextlib.nullcontext():
        while True:
            try:
                query = query_of(arguments)
                status = await fetch_status(arguments.coordinator, caller, query=query, clock=clock)
            except ConnectionLost as lost:
                if not arguments.watch:
                    raise
                # It may be restarting: keep watching.
                _say(f"no status from {arguments.coordinator}: {lost}")
            else:
                if live is not None:
                    live.update(render(status), refresh=True)
                elif arguments.json:
                    print(to_json(status), flush=True)
                else:
                    console().print(render(status))
            if not arguments.watch:
                return
            await asyncio.sleep(REFRESH_S)


async def _caller(
    arguments: argparse.Namespace, description: RunDescription, *, now: float
) -> Identity | Peer:
    if arguments.no_tls:
        return Peer(description.run_id, Role.OPERATOR, Role.OPERATOR.value)
    directory = arguments.state_dir / Role.OPERATOR / IDENTITY_DIRECTORY
    try:
        known = identity_on_disk(directory, role=Role.OPERATOR, run=description, node_id=None, now=now)
        if known is not None:
            if arguments.token_file is not None:
                _say(f"{known.node_id} has its certificate in {directory}: leave --token-file out")
            return known
        # Only here: what reads tokens and issues certificates takes as long to import as all the rest.
        from node.enrolment.enrolment_client import obtain_identity

        identity = await obtain_identity(
            directory,
            run=description,
            role=Role.OPERATOR,
            node_id=None,
            token_file=arguments.token_file,
            now=now,
            warn=_say,
            patience_s=TIMEOUT_S,
        )
    except OSError as error:
        raise cannot_make(directory, error, fix="Choose another --state-dir.") from error
    if arguments.token_file is not None:  # else it was refused
        _say(f"enrolled as {identity.node_id}: the certificate is in {directory}, leave --token-file out now")
    return identity


def _say(sentence: str) -> None:
    print(f"heterorl-node: {visible(sentence)}", file=sys.stderr)
