"""Outcomes of copying a ledger: `ledger backup` writes them beside it, the coordinator shows them as metrics.

copy made  --> made_at_s, no failures        copy failed --> one failure more, made_at_s stays
"""

from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.system import durable

FILE_NAME: Final = "backups.json"


class BackupRecord(BaseModel):
    """The newest whole copy, and the attempts that have failed since."""

    model_config = ConfigDict(frozen=True)

    made_at_s: float | None = Field(default=None, ge=0)
    """Unix seconds; None: no copy was ever made."""
    made_to: str = ""
    failures: int = Field(default=0, ge=0)
    """Attempts in a row that failed since."""
    why: str = ""
    """Why the last one failed."""

    def age_s(self, *, now: float) -> float:
        """Return the seconds since the newest copy; infinite where there is none."""
        return float("inf") if self.made_at_s is None else max(0.0, now - self.made_at_s)

    def after_failure(self, why: str) -> "BackupRecord":
        """Return the record after one attempt more that failed."""
        return self.model_copy(update={"failures": self.failures + 1, "why": why})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record; return an empty one where there is none, or none that can be read."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return cls()

    def save(self, path: Path) -> None:
        """Replace the record. Root may write it, and the coordinator's user reads it. Raises OSError."""
        durable.write(path, self.model_dump_json().encode(), mode=0o644)
