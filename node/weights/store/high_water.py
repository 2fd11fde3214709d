"""The newest policy ever accepted: nothing older, and no other policy of that number, is accepted again.

A signature says who made a version, not when. Someone who keeps old manifests could serve them
again (replay, rollback), and a learner restored from an old checkpoint could make version n twice
(fork). Version numbers grow within a run, and the epoch grows with every start of the learner, so a
mark that survives restarts, and the loss of every artifact, detects all three.

    older epoch                         FENCED     a second learner, or one that was rolled back
    older version, whatever the epoch   ROLLBACK
    same version, another root          ROLLBACK   a fork
    same version, same root             accepted: it is what we have
"""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from node.errors import Reason, RefusedError
from node.system import durable
from node.system.sealed import sealed, unsealed
from node.values.policy import PolicyVersion
from node.weights.format.manifest import Manifest


class Head(BaseModel):
    """The newest version accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=0)
    root: str = Field(pattern=r"^[0-9a-f]{32}$")
    learner_epoch: int = Field(ge=0)
    published_at_s: float = Field(ge=0)

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion(self.number, bytes.fromhex(self.root))


class HighWater(BaseModel):
    """The newest epoch and version seen; ``HighWater()``: none. Save it before acting on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learner_epoch: int = Field(default=0, ge=0)
    head: Head | None = None

    def check(self, *, learner_epoch: int, version: PolicyVersion) -> None:
        """Refuse what the mark rules out. Raises RefusedError: FENCED or ROLLBACK."""
        if learner_epoch < self.learner_epoch:
            raise RefusedError(
                Reason.FENCED,
                f"version {version.number} is of learner epoch {learner_epoch}, "
                f"but epoch {self.learner_epoch} was seen",
                fix="stop the older learner",
            )
        if self.head is None or version.number > self.head.number:
            return
        if version.number < self.head.number:
            raise RefusedError(
                Reason.ROLLBACK,
                f"version {version.number} is older than version {self.head.number}, which was seen before",
            )
        if version.root.hex() != self.head.root:
            raise RefusedError(
                Reason.ROLLBACK,
                f"version {version.number} has root {version.root.hex()}, "
                f"but was seen before with root {self.head.root}",
                fix="restore the newest copy of the learner's state directory",
            )

    def after(self, manifest: Manifest) -> "HighWater":
        """Return the mark with the manifest's version as the head; the epoch does not go back."""
        head = Head(
            number=manifest.version,
            root=manifest.root.hex(),
            learner_epoch=manifest.learner_epoch,
            published_at_s=manifest.published_at_s,
        )
        return HighWater(learner_epoch=max(self.learner_epoch, manifest.learner_epoch), head=head)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the mark; return an empty one if there is no file.

        Raises ValueError: the file is damaged. OSError: it cannot be read.
        """
        try:
            return cls.model_validate(unsealed(path.read_bytes()))
        except FileNotFoundError:
            return cls()

    def save(self, path: Path) -> None:
        """Replace the file. The mark is on disk when this returns."""
        durable.write(path, sealed(self.model_dump_json()))
