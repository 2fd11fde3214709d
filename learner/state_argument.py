"""``--state-dir`` of commands that run where the learner does."""

import argparse
from pathlib import Path

from node.commands.terminal import state_of
from node.values.roles import Role


def add_learner_state(parser: argparse.ArgumentParser) -> None:
    """Declare ``--state-dir``."""
    parser.add_argument(
        "--state-dir", type=Path, required=True, metavar="DIR",
        help="the learner's node.state_dir; the command runs where it is",
    )  # fmt: skip


def learner_state(arguments: argparse.Namespace) -> Path:
    """Return the learner's directory below ``--state-dir``; a StartupError if there is none."""
    return state_of(Role.LEARNER, arguments)
