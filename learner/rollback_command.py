"""``heterorl-node rollback``: go on from an earlier version, under a new number."""

import argparse
import json
import secrets
from dataclasses import asdict
from typing import Final

from learner.operator_orders import OperatorOrders, RollbackOrder
from learner.state_argument import add_learner_state, learner_state, written
from node.errors import StartupError
from node.exit_code import ExitCode

EXAMPLE: Final = """\
  heterorl-node rollback 140 --state-dir runs/first --because "reward fell after 150"

The learner's next version gets the weights of version 140, as samplers had them, and a new number. Samplers
fetch it like any other. The optimizer begins anew, without moments. Groups that were sampled before are
refused as stale, and their prompts are leased again. 0 is the base model. A running learner does this between
two steps, within a second; one that is down does it at its next start.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``heterorl-node rollback``."""
    parser.add_argument(
        "version", type=int, metavar="VERSION", help="an earlier version that the learner still has"
    )
    add_learner_state(parser)
    parser.add_argument("--because", metavar="TEXT", default="", help="a remark for the learner's log")
    parser.add_argument("--json", action="store_true", help="the order as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Order the rollback.

    Raises:
        StartupError: the version is not there, or the order cannot be written.
    """
    from learner.export import check_there  # torch, which --help does not need

    state, version = learner_state(arguments), arguments.version
    if version < 0:
        raise StartupError(
            f"there is no version {version}", fix="Name 0, the base model, or a later version."
        )
    if version > 0:
        check_there(state, version)
    order = RollbackOrder(secrets.token_hex(8), version, arguments.because)
    with written(state):
        OperatorOrders(state).order_rollback(order)
    if arguments.json:
        print(json.dumps(asdict(order)))
    else:
        print(
            f"ordered: the next version gets the weights of version {version}. The learner's log will say "
            "`rolled back`, and `heterorl-node status` shows it as unusual"
        )
    return ExitCode.DRAINED
