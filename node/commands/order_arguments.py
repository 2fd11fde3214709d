"""The arguments of verbs, by what these take, and the things and values that they name."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from node.commands.known_nodes import bad_node, check_known
from node.commands.terminal import name
from node.config.setting_sources import value_of_text
from node.coordinator.work.orders.verbs import Takes, Verb
from node.enrolment.authority import Authority
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.enrolment.move_notice import sign_move
from node.errors import COMMAND_LINE, ConfigError
from node.values.operator_order import EVERYBODY
from node.values.roles import Role


def _no_arguments(parser: argparse.ArgumentParser, verb: Verb) -> None:
    pass


def _node_arguments(parser: argparse.ArgumentParser, verb: Verb) -> None:
    besides = f", or {EVERYBODY}" if verb.takes_everybody else ""
    parser.add_argument(
        "about",
        nargs="*",
        type=name,
        metavar="NODE",
        help=f"ids, as `heterorl-node status` shows them{besides}",
    )


def _setting_arguments(parser: argparse.ArgumentParser, verb: Verb) -> None:
    parser.add_argument(
        "about", nargs="*", metavar="learner.KEY=VALUE", help="the new value of a key; with --undo, the key"
    )


def _version_arguments(parser: argparse.ArgumentParser, verb: Verb) -> None:
    parser.add_argument("version", type=int, metavar="VERSION", help="an earlier version")


def _address_arguments(parser: argparse.ArgumentParser, verb: Verb) -> None:
    parser.add_argument(
        "--to", metavar="HOST:PORT", action="append", required=True,
        help="the members port that peers will find it at; may be repeated",
    )  # fmt: skip


DECLARATIONS: Final[dict[Takes, Callable[[argparse.ArgumentParser, Verb], None]]] = {
    Takes.NOTHING: _no_arguments,
    Takes.NODES: _node_arguments,
    Takes.SAMPLERS: _node_arguments,
    Takes.SETTINGS: _setting_arguments,
    Takes.VERSION: _version_arguments,
    Takes.ADDRESSES: _address_arguments,
}


_Named = Iterator[tuple[str, str]]
"""For each order, what it is about and its value."""


def _run_itself(state: Path, arguments: argparse.Namespace, verb: Verb) -> _Named:
    yield "", ""


def _nodes(state: Path, arguments: argparse.Namespace, verb: Verb) -> _Named:
    nodes = list(dict.fromkeys(arguments.about))
    if not nodes:
        raise bad_node(None, "no node is named", fix="Name one or more, or use --list.")
    for node in nodes:
        if why := (verb.not_about or {}).get(node):
            raise bad_node(node, why)
    if not arguments.undo:
        named = [node for node in nodes if not (verb.takes_everybody and node == EVERYBODY)]
        check_known(state, named, role=Role.SAMPLER if verb.takes is Takes.SAMPLERS else None)
    yield from ((node, "") for node in nodes)


def _settings(state: Path, arguments: argparse.Namespace, verb: Verb) -> _Named:
    if not arguments.about:
        raise _bad_setting("", None, "needs learner.KEY=VALUE, --undo learner.KEY or --list")
    for text in arguments.about:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not key.startswith("learner."):
            raise _bad_setting(key, value, "only keys of [learner] can be set: learner.KEY=VALUE")
        if arguments.undo:
            yield key, ""
            continue
        if not equals or not value:
            raise _bad_setting(key, None, "needs a value: KEY=VALUE")
        read = value_of_text(value, has_type=False)
        if not isinstance(read, bool | float | int | str):
            raise _bad_setting(key, value, "must be a number, a truth value or a word")
        yield key, json.dumps(read)


def _bad_setting(key: str, value: object, rule: str) -> ConfigError:
    fix = "See heterorl-node set --help"
    return ConfigError(key=key or "set", value=value, source=COMMAND_LINE, rule=rule, fix=fix)


def _version(state: Path, arguments: argparse.Namespace, verb: Verb) -> _Named:
    yield "", str(arguments.version)


def _addresses(state: Path, arguments: argparse.Namespace, verb: Verb) -> _Named:
    to = tuple(dict.fromkeys(arguments.to))
    authority = Authority.load(state / AUTHORITY_DIRECTORY)
    try:
        yield "", sign_move(authority, to, now=time.time()).decode()
    except ValueError as error:
        raise ConfigError(
            key="--to",
            value=", ".join(to),
            source=COMMAND_LINE,
            rule=str(error),
            fix="Write host:port as peers dial it.",
        ) from error


READERS: Final[dict[Takes, Callable[[Path, argparse.Namespace, Verb], _Named]]] = {
    Takes.NOTHING: _run_itself,
    Takes.NODES: _nodes,
    Takes.SAMPLERS: _nodes,
    Takes.SETTINGS: _settings,
    Takes.VERSION: _version,
    Takes.ADDRESSES: _addresses,
}
