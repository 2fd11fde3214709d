"""The learner epoch: a number that is higher at every start, by which peers fence older learners."""

from pathlib import Path

from node.errors import StartupError
from node.identity.files import write_public


def raise_epoch(path: Path) -> int:
    """Give the epoch of this start, durable before it is given: 1 the first time.

    Raises:
        StartupError: the file does not hold a number.
    """
    try:
        before = int(path.read_text()) if path.exists() else 0
    except ValueError as error:
        raise StartupError(
            f"{path} does not hold a number",
            fix="Write the learner epoch that `heterorl-node status` shows into it",
        ) from error
    write_public(path, f"{before + 1}\n".encode())
    return before + 1
