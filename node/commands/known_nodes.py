"""Names of nodes in commands' arguments: whether they were ever let in, and what was probably meant."""

import difflib
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from node.coordinator.ledger.ledger_file import FILE_NAME as LEDGER_FILE
from node.enrolment.enrolment_ledger import FILE_NAME as ENROLMENT_FILE
from node.enrolment.enrolment_ledger import known_members
from node.errors import COMMAND_LINE, ConfigError
from node.values.roles import Role

_LISTED: Final = 20
"""Names in a message."""


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
