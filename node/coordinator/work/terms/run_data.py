"""The rows that a run's prompts are made from, and which others may take their place; pure."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from node.errors import ConfigError
from node.text.wording import counted
from node.values.fact import Fact


@dataclass(frozen=True, slots=True)
class DataSeen(Fact):
    """The rows that a run's prompts are made from, as the coordinator found them."""

    kind: ClassVar[str] = "data"
    heading: ClassVar[str] = "data"

    digest: bytes
    rows: int
    evaluation_rows: int
    held_out_at: int = 0
    """Number of the first of them: they were the last ones when the run began, and keep their numbers."""
    first_slot: int = 0
    """The first slot that asks for any of these rows; those before it were drawn from fewer."""

    def __str__(self) -> str:
        if not self.rows:
            return "no data"
        held_out = f"{self.evaluation_rows} held out from row {self.held_out_at} on"
        return f"{self.rows} rows, digest {self.digest.hex()[:12]}, {held_out}"

    def told(self, now: float) -> str:
        """Return how many rows there are and are held out; empty: samplers have their own."""
        return f"{counted(self.rows, 'row')}, {self.evaluation_rows} held out" if self.rows else ""


NO_DATA: Final = DataSeen(b"", 0, 0)


def agreed_data(known: DataSeen, found: DataSeen, *, known_part: bytes, next_slot: int) -> DataSeen | None:
    """Return the data to note; None where nothing changes.

    Args:
        known: As noted before.
        found: Now; its ``first_slot`` does not count.
        known_part: Digest of as many of the rows found as were known, in the order of their numbers.
        next_slot: The first slot that was never leased; 0: nothing was, and everything may change.
    Raises:
        ConfigError: The data is not the run's, nor the run's with rows added: a slot would ask for another
            prompt than before, and rows that were trained on could be held out.
    """
    found = replace(found, first_slot=known.first_slot if next_slot else 0)
    if found == known:
        return None
    if not next_slot:
        return found
    held_out = (known.evaluation_rows, known.held_out_at)
    is_same = known_part == known.digest and (found.evaluation_rows, found.held_out_at) == held_out
    if known.rows and found.rows > known.rows and is_same:
        return replace(found, first_slot=next_slot)
    raise ConfigError(
        key="coordinator.data",
        value=str(found),
        source="the configuration",
        rule=f"this run began with {known}",
        fix="Put data and evaluation_rows back as they were: rows may only be added at the end of file. Or "
        "begin another run with `heterorl-node init`.",
    )
