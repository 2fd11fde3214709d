"""The run's signing key, and an epoch that is higher at every start.

Peers refuse artifacts of an older epoch, and so a second or a rolled-back learner.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from learner.publishing.kept_versions import PUBLISHED
from node.enrolment.init_run import SIGNING_KEY_FILE
from node.errors import StartupError
from node.identity.files import write_public
from node.identity.run_description import RunDescription
from node.identity.signatures import SigningKey
from node.weights.store.catalogue import HEAD_FILE
from node.weights.store.high_water import HighWater

EPOCH_FILE = "epoch"


@dataclass(frozen=True, slots=True)
class Signer:
    """A learner's key and epoch."""

    key: SigningKey
    run_id: str
    learner_epoch: int

    @classmethod
    def load(cls, state_dir: Path, run: RunDescription) -> Self:
        """Read the key and begin a new epoch.

        Raises:
            StartupError: there is no key, it is another run's, or the epoch is damaged.
            OSError: the epoch cannot be written.
        """
        path = state_dir / SIGNING_KEY_FILE
        if not path.exists():
            raise StartupError(
                f"There is no signing key at {path}",
                fix=f"Copy learner/{SIGNING_KEY_FILE} from the directory that `heterorl-node init` made.",
            )
        key = SigningKey.load(path)
        if key.public_key != run.learner_public_key:
            raise StartupError(
                f"{path} is not the key that run {run.run_id} is signed with",
                fix="Use signing key and run.json of the same `heterorl-node init`.",
            )
        try:
            published = HighWater.load(state_dir / PUBLISHED / HEAD_FILE).learner_epoch
        except ValueError:
            published = 0  # the store says so, and what to do
        return cls(key, run.run_id, raise_epoch(state_dir / EPOCH_FILE, published=published))


def raise_epoch(path: Path, *, published: int = 0) -> int:
    """Return the epoch of this start, which is on disk by then: 1 the first time.

    Args:
        published: epoch of the versions in the learner's own store, which none that began later is below.
    Raises:
        StartupError: the file does not hold the number of the newest start.
        OSError: it cannot be written.
    """
    try:
        before = int(path.read_text()) if path.exists() else 0
    except ValueError as error:
        raise StartupError(
            f"{path} does not hold a number",
            fix="Write the learner epoch that `heterorl-node status` shows into it",
        ) from error
    if before < published:
        raise StartupError(
            f"{path} says that the newest start had epoch {before}, versions of epoch {published} were "
            "published",
            fix=f"Write {published} into it; where the directory is an older copy, restore the newest one.",
        )
    write_public(path, f"{before + 1}\n".encode())
    return before + 1
