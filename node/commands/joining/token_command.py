"""``heterorl-node token DIR``: make a token that lets peers enrol; list and cancel those that were made."""

import argparse
import contextlib
import dataclasses
import json
import re
import sqlite3
import sys
import time
from pathlib import Path
from typing import Final

from node.commands.terminal import console, name, table, target
from node.enrolment.authority import Authority
from node.enrolment.enrolment_ledger import FILE_NAME as LEDGER_FILE
from node.enrolment.enrolment_ledger import EnrolmentLedger, IssuedToken, known_members
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.enrolment.tokens import (
    ENROLLING_ROLES,
    MAX_LIFETIME_S,
    MOST_USES,
    Token,
    issue_token,
    write_token_file,
)
from node.errors import COMMAND_LINE, ConfigError, StartupError
from node.exit_code import ExitCode
from node.identity.certificates import is_same_certificate
from node.identity.run_description import FILE_NAME as RUN_FILE
from node.identity.run_description import RunDescription
from node.rpc.address import ENROLMENT_PORT, MEMBERS_PORT, join_address, split_target
from node.system.clock import moment
from node.values.roles import Role

EXAMPLE: Final = """\
  one sampler, which `heterorl-node join TOKEN` starts on its machine:
    heterorl-node token runs/first --role sampler --address hub.example.org:7701
  twenty, for the start-up script of rented machines:
    heterorl-node token runs/first --role sampler --address hub.example.org:7701 --uses 20
  the tokens that were made, and an end to one:
    heterorl-node token runs/first --list
    heterorl-node token runs/first --cancel 0123456789ab
"""

_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node token``."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the directory made by `heterorl-node init`"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", dest="is_list", help="show the tokens that were made")
    what.add_argument("--cancel", metavar="NUMBER", help="let nobody in with a token any more; see --list")
    parser.add_argument("--json", action="store_true", help="with --list: one JSON object a line")
    parser.add_argument(
        "--role",
        choices=[role.value for role in ENROLLING_ROLES],
        help="what the peer will be; required to make a token",
    )
    parser.add_argument(
        "--uses",
        type=_uses,
        default=1,
        metavar="N",
        help=f"peers that it lets in, at most {MOST_USES}; default: 1",
    )
    parser.add_argument(
        "--node-id", type=name, metavar="ID", help="the only node id it admits; default: any not taken"
    )
    parser.add_argument(
        "--ttl",
        type=lifetime,
        default="2d",
        metavar="TIME",
        help="30m, 12h, 7d, which is the most; default: 2d",
    )
    parser.add_argument(
        "--address",
        type=target(ENROLMENT_PORT),
        metavar="HOST:PORT",
        help="where the new peer reaches the coordinator's enrolment port (coordinator.enrolment_listen, "
        f"{ENROLMENT_PORT} by default); required to make a token",
    )
    parser.add_argument(
        "--coordinator",
        type=target(MEMBERS_PORT, or_several=True),
        metavar="HOST:PORT",
        help="where it reaches the members port (coordinator.listen), for `heterorl-node join`; default: "
        f"port {MEMBERS_PORT} of the same host where --address has port {ENROLMENT_PORT}",
    )
    parser.add_argument(
        "--run-file", type=Path, metavar="FILE", help=f"the run's description; default: DIR/{RUN_FILE}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the token to FILE, readable by you only; default: standard output",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or write a token, list tokens, or cancel one."""
    directory = arguments.directory / Role.COORDINATOR
    authority = Authority.load(directory / AUTHORITY_DIRECTORY)
    path = directory / LEDGER_FILE
    try:
        with contextlib.closing(EnrolmentLedger(path)) as ledger:
            _run(arguments, authority, ledger)
    except sqlite3.Error as error:
        raise StartupError(
            f"the list of tokens {path} cannot be read or written: {error}",
            fix="Check its owner and the disk, and run this again.",
        ) from error
    return ExitCode.DRAINED


def _run(arguments: argparse.Namespace, authority: Authority, ledger: EnrolmentLedger) -> None:
    if arguments.json and not arguments.is_list:
        raise _bad("--json", None, "is for --list", fix="Leave it out, or add --list.")
    if arguments.is_list:
        _show(ledger.issued(), as_json=arguments.json)
        if ledger.is_incomplete:
            _say(
                "These are the tokens that were made on this machine. Peers let in since the run's ledger "
                "moved to a database are recorded there, and not shown."
            )
    elif arguments.cancel is None:
        _make(arguments, authority, ledger)
    elif ledger.cancel(arguments.cancel):
        print(f"{arguments.cancel} lets nobody in any more; `revoke` shuts out peers that it let in before")
        if ledger.is_incomplete:
            _say(
                "The run's coordinators share a database: this counts while the coordinator of this machine "
                "leads. The others let peers in with the token until it expires."
            )
    else:
        raise _bad("--cancel", arguments.cancel, "no such token was made here", fix="See --list.")


def _make(arguments: argparse.Namespace, authority: Authority, ledger: EnrolmentLedger) -> None:
    for flag in ("role", "address"):
        if getattr(arguments, flag) is None:
            raise _bad(
                f"--{flag}", None, "is required to make a token", fix="See `heterorl-node token --help`."
            )
    members = known_members(arguments.directory / Role.COORDINATOR / LEDGER_FILE) or {}
    if members.get(arguments.node_id, arguments.role) != arguments.role:
        rule = f"is a {members[arguments.node_id]} of this run, and the token is for a {arguments.role}"
        raise _bad("--node-id", arguments.node_id, rule, fix="Choose another name.")
    if arguments.uses > 1 and arguments.node_id is not None:
        rule = "names one node, and --uses more than one"
        raise _bad("--node-id", arguments.node_id, rule, fix="Leave out one of the two.")
    now, run_file = time.time(), arguments.run_file or arguments.directory / RUN_FILE
    run = RunDescription.load(run_file) if arguments.run_file or run_file.exists() else None
    if run is not None and not is_same_certificate(run.ca_certificate_pem, authority.certificate_pem):
        raise _bad(
            "--run-file",
            str(run_file),
            f"describes run {run.run_id!r} of another authority than run {authority.run_id!r} has in "
            f"{arguments.directory}",
            fix=f"Name this run's {RUN_FILE}, or its directory as DIR.",
        )
    text = issue_token(
        authority,
        role=Role(arguments.role),
        node_id=arguments.node_id,
        address=arguments.address,
        now=now,
        lifetime_s=arguments.ttl,
        uses=arguments.uses,
        coordinator=arguments.coordinator or _beside(arguments.address),
        run=run,
    )
    token = Token.parse(text)
    ledger.note_issued(token)
    if arguments.out is None:
        print(text)
    else:
        write_token_file(arguments.out, text)
    _say("\n".join(_next_steps(arguments, token)))


def _next_steps(arguments: argparse.Namespace, token: Token) -> list[str]:
    """Return what to do with a token, in lines."""
    kept = f"{arguments.out} has mode 600" if arguments.out else "Keep it in a file of mode 600 (--out FILE)"
    peers = f"one {token.role}" if token.uses == 1 else f"{token.uses} {token.role}s"
    lines = [
        f"Token {token.number}, valid for {peers} of run {token.run_id} until {moment(token.expires_at_s)} "
        f"(--ttl). It is a secret. {kept}."
    ]
    if token.role is Role.OPERATOR:
        lines.append("On the operator's machine, name it with `status --token-file`.")
    elif token.can_join:
        lines.append(f"On the {token.role}'s machine: heterorl-node join {arguments.out or 'TOKEN'}")
    else:
        lines.append(f"On the {token.role}'s machine, set node.token_file to it.")
    return lines


def _show(tokens: tuple[IssuedToken, ...], *, as_json: bool) -> None:
    if as_json:
        for token in tokens:
            print(json.dumps(dataclasses.asdict(token)))
        return
    rows = table("token", "role", "node", "used", "until", "by")
    for one in tokens:
        until = "cancelled" if one.is_cancelled else moment(one.expires_at_s)
        used = f"{len(one.used_by)}/{one.uses}"
        rows.add_row(one.number, one.role, one.node_id or "any", used, until, ", ".join(one.used_by) or "-")
    console().print(rows if tokens else "no token was made")


def _beside(enrolment: str) -> str | None:
    """Return the members port beside an enrolment port that is the default; None: it cannot be known."""
    host, port = split_target(enrolment)
    return join_address(host, MEMBERS_PORT) if port == ENROLMENT_PORT else None


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _bad(key: str, value: str | None, rule: str, *, fix: str) -> ConfigError:
    return ConfigError(key=key, value=value, source=COMMAND_LINE, rule=rule, fix=fix)


def _uses(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_USES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_USES}")
    return int(text)


def lifetime(text: str) -> float:
    """Return the seconds in ``90s``, ``30m``, ``1h`` or ``2d``; the ``type`` of an argument."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    lifetime_s = float(match[1]) * _UNIT_S[match[2]] if match else 0.0
    if not 0 < lifetime_s <= MAX_LIFETIME_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number and s, m, h or d, at most 7d")
    return lifetime_s
