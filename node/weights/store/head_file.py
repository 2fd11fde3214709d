"""The file a store keeps even if every artifact is lost: newest learner epoch, and announced head."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from node import durable
from node.policy import PolicyVersion
from node.weights.store.high_water import HighWater


class Head(BaseModel):
    """The newest version ever announced."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=0)
    root: str = Field(pattern=r"^[0-9a-f]{32}$")
    learner_epoch: int = Field(ge=0)
    published_at_s: float = Field(ge=0)

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion(self.number, bytes.fromhex(self.root))


class StoreMark(BaseModel):
    """The content of the file: how far this peer has ever come."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learner_epoch: int = Field(default=0, ge=0)
    """The newest epoch that an offer was admitted from."""
    head: Head | None = None

    @property
    def high_water(self) -> HighWater:
        return HighWater(self.learner_epoch, None if self.head is None else self.head.policy_version)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the mark; return an empty one if there is no file.

        Raises ValueError: the file is damaged. OSError: it cannot be read.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()

    def save(self, path: Path) -> None:
        """Replace the file. The mark is on disk when this returns."""
        durable.write(path, self.model_dump_json().encode())
