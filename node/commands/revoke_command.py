"""``heterorl-node revoke NODE``: shut a node out of the run, let it in again, list the nodes shut out.

It edits ``DIR/coordinator/revoked``, which a running coordinator reads again by itself: no restart and no
connection is needed. Lines and remarks that people wrote into the file stay as they are.
"""

import argparse
import difflib
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from node.clock import moment
from node.commands.terminal import add_coordinator_state, coordinator_state, name
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import known_members
from node.errors import ConfigError
from node.exit_code import ExitCode
from node.identity.files import cannot_make, cannot_read, write_public
from node.identity.revocation import FILE_NAME, remarks, with_revoked, without_revoked
from node.run import Role

EXAMPLE: Final = """\
  heterorl-node revoke sampler-3 --state-dir runs/first --because "its disk was sold"
  heterorl-node revoke --list --state-dir runs/first
  heterorl-node revoke --undo sampler-3 --state-dir runs/first
A running coordinator ends the node's streams within 5 s, and its relays follow; nothing is restarted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node revoke``."""
    parser.add_argument(
        "nodes", nargs="*", type=name, metavar="NODE", help="node ids, as `heterorl-node status` shows them"
    )
    add_coordinator_state(parser)
    parser.add_argument("--because", metavar="TEXT", default="", help="a remark, kept beside the name")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="let the nodes in again")
    what.add_argument("--list", action="store_true", dest="is_list", help="show who is shut out, and why")


def run(arguments: argparse.Namespace) -> int:
    """Change or print the list; a running coordinator reads a change by itself."""
    state_dir, nodes = coordinator_state(arguments), arguments.nodes
    path = state_dir / FILE_NAME
    text = _read(path)
    listed = remarks(text)
    if arguments.is_list:
        width = max(map(len, listed), default=0)
        lines = (f"{node:{width}}  {remark}".rstrip() for node, remark in listed.items())
        print("\n".join(lines) or "no node is shut out")
    elif not nodes:
        raise _bad(None, "no node is named", fix="Name one or more, or use --list.")
    elif arguments.undo:
        for node in nodes:
            if node not in listed:
                raise _bad(node, "it is not shut out", close_to=listed)
        _write(path, without_revoked(text, nodes))
        print(f"{', '.join(nodes)} may come in again, with the certificate from before or a new token.")
    else:
        for node in nodes:
            _check(node, known_members(state_dir / ENROLMENT_FILE), path)
        remark = " ".join(f"{moment(time.time())} {arguments.because}".split())
        _write(path, with_revoked(text, nodes, remark=remark))
        undo = f"heterorl-node revoke --undo {' '.join(nodes)} --state-dir {arguments.state_dir}"
        print(
            f"{', '.join(nodes)} {'is' if len(nodes) == 1 else 'are'} shut out: a running coordinator ends "
            "their streams within 5 s, relays follow at their next heartbeat, and no token lets the name in "
            f"again.\nTo undo: {undo}"
        )
    return ExitCode.DRAINED


def _check(node: str, members: frozenset[str] | None, path: Path) -> None:
    if node == Role.COORDINATOR:
        raise _bad(node, "the coordinator keeps this list and cannot be shut out by it", fix="Correct it.")
    if members is not None and node not in members:
        otherwise = f"To shut out a name in advance, write it into {path}."
        raise _bad(node, "no node of this name has ever been let in", close_to=members, fix=otherwise)


def _bad(
    node: str | None, rule: str, *, close_to: Collection[str] = (), fix: str = "Correct it."
) -> ConfigError:
    close = difflib.get_close_matches(node, sorted(close_to), n=1) if node else []
    fix = f"Did you mean {close[0]}?" if close else fix
    return ConfigError(key="NODE", value=node, source="the command line", rule=rule, fix=fix)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise cannot_read(path, error, fix="Check path and owner.") from error


def _write(path: Path, text: str) -> None:
    try:
        write_public(path, text.encode())
    except OSError as error:
        raise cannot_make(path, error, fix="Check path and owner.") from error
