"""``heterorl-node why-stalled``: who waits for whom, since when, and what to do about it."""

import argparse
import dataclasses
import json
from functools import partial
from typing import Final

from node.commands.status.status_command import add_connection, ask, fetch_status
from node.commands.terminal import printable
from node.identity.identity_store import Identity
from node.identity.peer import Peer
from node.system.clock import Clock, SystemClock
from node.text.wording import duration
from node.values.run import PeerQuery, RunStatus

EXAMPLE: Final = """\
  heterorl-node why-stalled --state-dir runs/first --coordinator 127.0.0.1:7700
The first line is the run, each next one what the line before waits for; the last has what to do. For more of
the same, `heterorl-node status --waits-for TEXT` lists the peers.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node why-stalled``."""
    add_connection(parser)


def run(arguments: argparse.Namespace, *, clock: Clock | None = None) -> int:
    """Run the command; return 1 if the coordinator cannot be reached or refuses."""
    return ask(arguments, partial(_show, arguments), clock=clock or SystemClock())


async def _show(arguments: argparse.Namespace, caller: Identity | Peer, clock: Clock) -> None:
    status = await fetch_status(arguments.coordinator, caller, query=PeerQuery(limit=1), clock=clock)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(one) for one in status.waits]))
    else:
        print("\n".join(told(status)))


def told(status: RunStatus) -> list[str]:
    """Return the chain in lines, each a step further in."""
    lines = []
    for depth, one in enumerate(status.waits):
        indent = "  " * depth
        line = f"{indent}{one.who} waits for {one.waits_for}, for {duration(one.for_s)}"
        lines.append(printable(line))
        if one.remedy:
            lines.append(printable(f"{indent}  -> {one.remedy}"))
    if not lines and (now := status.headline) is not None:
        lines.append(printable(f"it moves: {now.doing}; that version is {duration(now.for_s)} old"))
    if (pace := status.bottleneck) is not None:
        lines.append(printable(f"its pace is {pace.text}"))
        lines += [printable(f"  -> {pace.remedy}")] if pace.remedy else []
    return lines or ["it moves"]
