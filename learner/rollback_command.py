"""``heterorl-node rollback``: go on from an earlier version, under a new number."""

import argparse
import json
import secrets
import time
from dataclasses import asdict
from typing import Final

from learner.operator_orders import OperatorOrders, RollbackOrder, RollbackOutcome
from learner.publishing.available_versions import BASE, available_versions, check_available
from learner.state_argument import add_learner_state, learner_state, written
from node.clock import moment
from node.exit_code import ExitCode

EXAMPLE: Final = """\
  heterorl-node rollback 140 --state-dir runs/first --because "reward fell after 150"

The learner's next version gets the weights of version 140, as samplers had them, and a new number. Samplers
fetch it like any other. The optimizer begins anew, without moments. Groups that were sampled before are
refused as stale, and their prompts are leased again. 0 is the base model. A running learner does this between
two steps, within a second; one that is down does it at its next start. The same order given twice is carried
out once; --again repeats it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node rollback``."""
    parser.add_argument(
        "version", type=int, metavar="VERSION", help="an earlier version that the learner still has"
    )
    add_learner_state(parser)
    parser.add_argument("--because", metavar="TEXT", default="", help="a remark for the learner's log")
    parser.add_argument(
        "--again", action="store_true", help="order it although the last order was for the same version"
    )
    parser.add_argument("--json", action="store_true", help="the order as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Order the rollback, unless that was the last order too.

    Raises:
        StartupError: the version is not there, or the order cannot be written.
    """
    state, version = learner_state(arguments), arguments.version
    orders = OperatorOrders(state)
    orders.check_readable()
    last = orders.last_rollback()
    if last is not None and last[0].version == version and not arguments.again:
        order, outcome = last
        if outcome is None or outcome.made_version is not None:
            _show(order, outcome, "ordered before" if outcome is None else "done before", arguments)
            return ExitCode.DRAINED
    if version == BASE:
        available_versions(state)  # without any there is nothing to go back from
    else:
        check_available(state, version, besides="0, the base model, and ")
    order = RollbackOrder(secrets.token_hex(8), version, arguments.because, time.time())
    with written(state):
        orders.order_rollback(order)
    _show(order, None, "ordered", arguments)
    return ExitCode.DRAINED


def _show(
    order: RollbackOrder, outcome: RollbackOutcome | None, done: str, arguments: argparse.Namespace
) -> None:
    made = None if outcome is None else outcome.made_version
    if arguments.json:
        print(json.dumps(asdict(order) | {"state": done, "made_version": made}))
        return
    when = f" at {moment(order.at_s)}" if done != "ordered" and order.at_s else ""
    if made is None:
        what = f"the next version gets the weights of version {order.version}"
        sign = "The learner's log will say `rolled back`, and `heterorl-node status` shows it as unusual"
        print(f"{done}{when}: {what}. {sign}")
    else:
        print(f"{done}{when}: version {made} has the weights of version {order.version}; nothing was ordered")
    if done != "ordered":
        print("To order it once more, add --again.")
