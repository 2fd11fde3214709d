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
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import known_members
from node.errors import COMMAND_LINE, ConfigError
from node.identity.files import cannot_make, cannot_read, write_public
from node.identity.revocation import remarks, with_nodes, without_nodes


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

    def remove(self, nodes: Sequence[str], *, otherwise: str) -> None:
        """Remove nodes. Raises ConfigError: one is not in it; ``otherwise`` says what it is then."""
        for node in nodes:
            if node not in self.remarks:
                raise bad_node(node, otherwise, close_to=self.remarks)
        self._write(without_nodes(self._text, nodes))

    def check_known(self, node: str) -> None:
        """Check that a node was ever let in, where that is known here. Raises ConfigError: it was not."""
        members = known_members(self._path.with_name(ENROLMENT_FILE))
        if members is None:
            unchecked = "the list of the run's members is not here (it may be in the run's database)"
            print(f"{node} is taken as it is: {unchecked}", file=sys.stderr)
        elif node not in members:
            rule = "no node of this name has ever been let in"
            fix = f"To name one in advance, write it into {self._path}."
            raise bad_node(node, rule, close_to=members, fix=fix)

    def _write(self, text: str) -> None:
        try:
            write_public(self._path, text.encode())
        except OSError as error:
            raise cannot_make(self._path, error, fix="Check path and owner.") from error


def bad_node(
    node: str | None, rule: str, *, close_to: Collection[str] = (), fix: str = "Correct it."
) -> ConfigError:
    """Return the error for a node that an argument names, or does not."""
    close = difflib.get_close_matches(node, sorted(close_to), n=1) if node else []
    fix = f"Did you mean {close[0]}?" if close else fix
    return ConfigError(key="NODE", value=node, source=COMMAND_LINE, rule=rule, fix=fix)


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


def check_named(nodes: Sequence[str]) -> None:
    """Check that an argument names a node at all. Raises ConfigError: it does not."""
    if not nodes:
        raise bad_node(None, "no node is named", fix="Name one or more, or use --list.")
