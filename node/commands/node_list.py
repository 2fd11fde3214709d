"""A list of nodes in the coordinator's state directory, changed by commands and by hand.

A running coordinator reads a change by itself: no restart and no connection is needed. Lines and remarks that
people wrote into the file stay as they are.
"""

import argparse
import difflib
import json
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from node.clock import moment
from node.commands.terminal import add_coordinator_state, name
from node.coordinator.ledger.ledger_file import FILE_NAME as LEDGER_FILE
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import known_members
from node.errors import COMMAND_LINE, ConfigError
from node.identity.files import cannot_make, cannot_read, write_public
from node.identity.revocation import remarks, with_nodes, without_nodes
from node.run import Role

_LISTED: Final = 20
"""Names in a message."""


class NodeList:
    """The list in a file."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises StartupError: it cannot be read."""
        self._path = path
        try:
            self._text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            self._text = ""
        except OSError as error:
            raise cannot_read(path, error, fix="Check path and owner.") from error
        self.remarks: Final = remarks(self._text)

    def show(self, *, as_json: bool, nobody: str, besides: str = "") -> None:
        """Print the nodes with their remarks, or ``nobody``; ``besides`` is none of them."""
        shown = {node: remark for node, remark in self.remarks.items() if node != besides}
        width = max(map(len, shown), default=0)
        lines = [f"{node:{width}}  {remark}".rstrip() for node, remark in shown.items()]
        print(json.dumps(shown) if as_json else "\n".join(lines) or nobody)

    def add(self, nodes: Iterable[str], *, because: str) -> None:
        """Add nodes, as of now. Raises StartupError: the file cannot be written."""
        remark = " ".join(f"{moment(time.time())} {because}".split())
        self._write(with_nodes(self._text, nodes, remark=remark))

    def remove(self, nodes: Sequence[str], *, otherwise: str, besides: str = "") -> None:
        """Remove nodes. Raises ConfigError: one is not in it; ``otherwise`` says what it is then.

        ``besides`` is in the list, and no node.
        """
        for node in nodes:
            if node not in self.remarks:
                raise bad_node(node, otherwise, there=[one for one in self.remarks if one != besides])
        self._write(without_nodes(self._text, nodes))

    def _write(self, text: str) -> None:
        try:
            write_public(self._path, text.encode())
        except OSError as error:
            raise cannot_make(self._path, error, fix="Check path and owner.") from error


def check_known(state: Path, nodes: Iterable[str], *, role: Role | None = None, fix: str = "") -> None:
    """Check that nodes were ever let in, where that is known here, and in a role.

    Args:
        state: the coordinator's directory.
        role: None: any.
        fix: what to do about a name that is meant all the same.
    Raises:
        ConfigError: one was not; names those that were.
    """
    members = known_members(state / ENROLMENT_FILE)
    has_run = any((state / file).exists() for file in (ENROLMENT_FILE, LEDGER_FILE))
    if members is None and not has_run and role is not None:
        members = {}  # nobody can have been let in
    for node in nodes:
        if members is None:
            elsewhere = "it may be in the run's database" if has_run else "no coordinator has run here yet"
            unchecked = f"the list of the run's members is not here ({elsewhere})"
            print(f"{node} is taken as it is: {unchecked}", file=sys.stderr)
        elif node not in members:
            there = [name for name, of in members.items() if role in (None, of)]
            raise bad_node(node, "no node of this name has ever been let in", there=there, fix=fix)
        elif role not in (None, members[node]):
            there = [name for name, of in members.items() if of is role]
            raise bad_node(node, f"it is a {members[node]}, and this is for a {role}", there=there)


def bad_node(
    node: str | None, rule: str, *, there: Collection[str] | None = None, fix: str = ""
) -> ConfigError:
    """Return the error for a node that an argument names, or does not; ``there``: the names there are."""
    close = difflib.get_close_matches(node or "", sorted(there or ()), n=1)
    meant = f"Did you mean {close[0]}?" if close else ""
    names = "" if there is None else "There is none."
    if there:
        more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
        names = f"There are {', '.join(sorted(there)[:_LISTED])}{more}."
    text = " ".join(filter(None, [meant, names, fix])) or "Correct it."
    return ConfigError(key="NODE", value=node, source=COMMAND_LINE, rule=rule, fix=text)


def add_list_arguments(parser: argparse.ArgumentParser, *, undo: str, listed: str) -> None:
    """Declare the nodes of a list, a remark, and what else may be done with it."""
    parser.add_argument(
        "nodes", nargs="*", type=name, metavar="NODE", help="node ids, as `heterorl-node status` shows them"
    )
    add_coordinator_state(parser)
    parser.add_argument("--because", metavar="TEXT", default="", help="a remark, kept beside the name")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help=undo)
    what.add_argument("--list", action="store_true", dest="is_list", help=listed)
    parser.add_argument("--json", action="store_true", help="with --list: one JSON object, name to remark")


def check_none_named(nodes: Sequence[str]) -> None:
    """Check that no node is named beside ``--list``. Raises ConfigError: one is."""
    if nodes:
        raise bad_node(nodes[0], "--list shows all, and takes no node", fix="Leave one of the two out.")


def check_named(nodes: Sequence[str]) -> None:
    """Check that an argument names a node at all. Raises ConfigError: it does not."""
    if not nodes:
        raise bad_node(None, "no node is named", fix="Name one or more, or use --list.")
