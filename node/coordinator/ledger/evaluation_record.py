"""Reads the evaluations of a run from its ledger, whether a coordinator writes it or not."""

import sqlite3
from pathlib import Path

from node.coordinator.ledger.ledger_check import reading
from node.errors import StartupError
from node.run import Evaluation


def read_evaluations(ledger: Path) -> tuple[Evaluation, ...]:
    """Return every evaluation, oldest version first; the one under way is the last.

    Raises:
        StartupError: the ledger is not there or cannot be read.
    """
    try:
        with reading(ledger) as connection:
            rows = connection.execute("SELECT * FROM evaluations ORDER BY version")
            return tuple(Evaluation(*row) for row in rows)
    except FileNotFoundError as error:
        raise StartupError(f"there is no ledger at {ledger}", fix="Check the path.") from error
    except sqlite3.Error as error:
        raise StartupError(
            f"the ledger {ledger} cannot be read: {error}",
            fix=f"See `heterorl-node ledger verify {ledger}`.",
        ) from error
