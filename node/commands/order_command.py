"""The commands of operators' orders, each made of its row in ``work.verbs``.

arguments --> orders --orders.sock--> the coordinator, which answers how they stand
                     '-- none runs: recorded in its ledger, and carried out at its next start
"""

import argparse
import dataclasses
import getpass
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from node.commands.known_nodes import bad_node
from node.commands.order_arguments import DECLARATIONS, READERS
from node.commands.terminal import add_coordinator_state, coordinator_state, printable
from node.coordinator.work.orders.order_decisions import new_ones
from node.coordinator.work.orders.verbs import VERBS, Repeated, Verb
from node.errors import COMMAND_LINE, ConfigError, Reason, RefusedError
from node.exit_code import ExitCode
from node.identity.run_description import FILE_NAME as RUN_FILE
from node.identity.run_description import RunDescription
from node.values.operator_order import Order

ANSWER_S: Final = 10.0
"""Longest wait for the learner's answer: it looks at orders between two steps."""

_CALL_S: Final = 20.0
"""Longest that a coordinator may take besides: its ledger's disk may be slow."""


class OrderCommand:
    """The command of one verb, as ``node.commands.cli`` runs a module."""

    def __init__(self, verb: Verb) -> None:
        self.verb = verb
        self.EXAMPLE = verb.example

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        verb = self.verb
        DECLARATIONS[verb.takes](parser, verb)
        add_coordinator_state(parser)
        parser.add_argument("--because", metavar="TEXT", default="", help="a remark, kept with the order")
        parser.add_argument(
            "--database", metavar="URL", help="while no coordinator runs: the run's, as coordinator.ledger"
        )
        options = []
        if verb.undo_help:
            options.append(("--undo", "undo", verb.undo_help))
        if verb.nobody:
            options.append(("--list", "is_list", "show the orders that hold, and why"))
        if verb.repeated is Repeated.LEFT_UNLESS_AGAIN:
            options.append(("--again", "again", "order it although it was the last order"))
        if options:
            what = parser.add_mutually_exclusive_group()
            for option, destination, help_text in options:
                what.add_argument(option, action="store_true", dest=destination, help=help_text)
        parser.add_argument("--json", action="store_true", help="the orders as one JSON array")
        parser.set_defaults(undo=False, is_list=False, again=False)  # where there is no such option

    def run(self, arguments: argparse.Namespace) -> int:
        """Send the orders, or list those that hold.

        Raises:
            ConfigError: an argument is wrong, or about nothing that there is.
            StartupError: the directory has no coordinator's state, or another process holds its ledger.
            RefusedError: the coordinator could not take them.
        """
        state, verb = coordinator_state(arguments), self.verb
        if arguments.is_list:
            if about := getattr(arguments, "about", []):
                raise bad_node(about[0], "--list shows all", fix="Leave one of the two out.")
            with _desk(state, arguments) as desk:
                _show(desk.listed(verb.name), verb, arguments)
            return ExitCode.DRAINED
        asked = self._asked(state, arguments)
        try:
            with _desk(state, arguments) as desk:
                stand = desk.give(asked, again=arguments.again)
        except RefusedError as refused:
            if refused.reason not in (Reason.MALFORMED, Reason.OVER_LIMIT):
                raise
            raise ConfigError(
                key=verb.name, value=None, source=COMMAND_LINE, rule=str(refused), fix="Correct it."
            ) from refused
        return self._say(asked, stand, arguments)

    def _asked(self, state: Path, arguments: argparse.Namespace) -> tuple[Order, ...]:
        verb = VERBS[self.verb.undoes] if self.verb.undoes else self.verb
        order = Order(
            verb.name,
            because=" ".join(arguments.because.split()),
            by=_user(),
            order_id=secrets.token_hex(8),
            is_undone=arguments.undo or bool(self.verb.undoes),
        )
        return tuple(
            dataclasses.replace(order, about=about, value=value)
            for about, value in READERS[verb.takes](state, arguments, verb)
        )

    def _say(self, asked: Sequence[Order], stand: Sequence[Order], arguments: argparse.Namespace) -> int:
        """Print what became of the orders; return 1 where the learner has refused one."""
        verb, fresh = self.verb, new_ones(stand, asked)
        is_refused = any(order.is_refused for order in fresh)
        if arguments.json:
            print(json.dumps([order.fields() for order in stand]))
            return ExitCode.FAILED if is_refused else ExitCode.DRAINED
        for order in stand:
            if order not in fresh:
                print(printable(_unchanged(order)))
        if fresh:
            sentence = verb.undone if arguments.undo else verb.given
            about = " ".join(order.about for order in fresh)
            print(sentence.format(about=about, value=fresh[0].value, dir=arguments.state_dir))
        for order in fresh if verb.is_for_learner else ():
            print(printable(_answer_of(order)))
        return ExitCode.FAILED if is_refused else ExitCode.DRAINED


def _unchanged(order: Order) -> str:
    if not order.order_id:
        return f"there is no {order.verb} to end"
    again = " To order it once more, add --again." if VERBS[order.verb].is_for_learner and order.value else ""
    what = f"{order.verb} {order.about}".rstrip()
    answer = f". {_answer_of(order)}" if order.answer else ""
    return f"ordered before: {what}, {order.remark}{answer}.{again}"


def _answer_of(order: Order) -> str:
    if not order.answer:
        return "The learner has not answered yet; `heterorl-node status` shows it until it has."
    return f"The learner {'refuses' if order.is_refused else 'answers'}: {order.answer}"


def _show(orders: Sequence[Order], verb: Verb, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps([order.fields() for order in orders]))
        return
    width = max((len(order.about) for order in orders), default=0)
    for order in orders:
        value = f"= {order.value}  " if order.value else ""
        refused = f" (refused: {order.answer})" if order.is_refused else ""
        print(printable(f"{order.about:{width}}  {value}{order.remark}{refused}"))
    if not orders:
        print(verb.nobody)


def _user() -> str:
    """Return who runs the command; behind sudo, who called that."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return "a user without a name"


# Whom the orders are given to.


class _Desk(Protocol):
    def give(self, asked: Sequence[Order], *, again: bool) -> tuple[Order, ...]: ...
    def listed(self, verb: str) -> tuple[Order, ...]: ...


class _RunningCoordinator:
    """A coordinator that takes orders on its socket; asks whether one does first."""

    def __init__(self, channel: Any) -> None:
        from heterorl.v1 import orders_pb2_grpc

        self._stub = orders_pb2_grpc.OrderServiceStub(channel)

    @property
    def is_there(self) -> bool:
        from heterorl.v1 import orders_pb2
        from node.rpc.local_socket import called

        request = orders_pb2.ListOrdersRequest(verb=next(iter(VERBS)))
        return called(self._stub.ListOrders, request, timeout_s=_CALL_S) is not None

    def give(self, asked: Sequence[Order], *, again: bool) -> tuple[Order, ...]:
        from heterorl.v1 import orders_pb2
        from node.wire.mapping import to_wire

        request = orders_pb2.GiveOrderRequest(
            orders=[to_wire(orders_pb2.Order, order) for order in asked], again=again, wait_s=ANSWER_S
        )
        return self._orders(self._stub.GiveOrder, request)

    def listed(self, verb: str) -> tuple[Order, ...]:
        from heterorl.v1 import orders_pb2

        return self._orders(self._stub.ListOrders, orders_pb2.ListOrdersRequest(verb=verb))

    def _orders(self, method: Callable[..., Any], request: Any) -> tuple[Order, ...]:
        from node.rpc.local_socket import called
        from node.wire.mapping import from_wire

        response = called(method, request, timeout_s=ANSWER_S + _CALL_S)
        if response is None:
            raise RefusedError(
                Reason.DRAINING, "the coordinator ended before it answered", fix="give the order again"
            )
        return tuple(from_wire(Order, order) for order in response.orders)


@contextmanager
def _desk(state: Path, arguments: argparse.Namespace) -> Iterator[_Desk]:
    """Yield whoever takes orders: the coordinator that runs, or its ledger."""
    from node.coordinator.operators.order_desk import SOCKET_NAME
    from node.rpc.local_socket import local_channel

    with local_channel(state / SOCKET_NAME) as channel:
        running = None if channel is None else _RunningCoordinator(channel)
        if running is not None and running.is_there:
            yield running
            return
    from node.coordinator.operators.offline_orders import offline_desk

    run = RunDescription.load(arguments.state_dir / RUN_FILE)
    with offline_desk(state, run_id=run.run_id, database=arguments.database) as desk:
        print("no coordinator runs here: its ledger is read and written directly", file=sys.stderr)
        yield desk
