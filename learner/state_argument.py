"""``--state-dir`` of commands that run where the learner does."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.commands.terminal import state_of
from node.identity.files import cannot_make
from node.run import Role


def add_learner_state(parser: argparse.ArgumentParser) -> None:
    """Declare ``--state-dir``."""
    parser.add_argument(
        "--state-dir", type=Path, required=True, metavar="DIR",
        help="the learner's node.state_dir; the command runs where it is",
    )  # fmt: skip


def learner_state(arguments: argparse.Namespace) -> Path:
    """Return the learner's directory below ``--state-dir``; a StartupError if there is none."""
    return state_of(Role.LEARNER, arguments)


@contextmanager
def written(directory: Path) -> Iterator[None]:
    """Explain why the body cannot write into a directory. Raises StartupError."""
    try:
        yield
    except OSError as error:
        raise cannot_make(directory, error, fix="Check path and owner.") from error
