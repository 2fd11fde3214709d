"""``--state-dir`` of commands that run where the learner does."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.errors import StartupError
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
    directory: Path = arguments.state_dir / Role.LEARNER
    if not directory.is_dir():
        raise StartupError(
            f"There is no learner's state in {arguments.state_dir}",
            fix="Run this where the learner runs, with its node.state_dir as --state-dir.",
        )
    return directory


@contextmanager
def written(directory: Path) -> Iterator[None]:
    """Explain why the body cannot write into a directory. Raises StartupError."""
    try:
        yield
    except OSError as error:
        raise cannot_make(directory, error, fix="Check path and owner.") from error
