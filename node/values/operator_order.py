"""An operator's order, as commands, coordinator and learner pass it on and the ledger keeps it."""

from dataclasses import dataclass
from typing import ClassVar, Final

from node.system.clock import moment
from node.values.fact import Fact

PAUSE: Final = "pause"
DRAIN: Final = "drain"
REVOKE: Final = "revoke"
PARDON: Final = "pardon"
MOVE: Final = "move"
SET: Final = "set"
ROLLBACK: Final = "rollback"

EVERYBODY: Final = "all"
"""In place of a node's id: all samplers."""


@dataclass(frozen=True, slots=True)
class Order(Fact):
    """An operator's word about one thing."""

    kind: ClassVar[str] = "order"

    verb: str
    about: str = ""
    """A node's id, a setting's key; empty: the run."""
    value: str = ""
    """As JSON for a setting, a number for a version, a signed notice for a move; empty: none."""
    because: str = ""
    by: str = ""
    """The user who gave it."""
    at_s: float = 0.0
    """Unix seconds on the coordinator's clock."""
    order_id: str = ""
    is_undone: bool = False
    """Whether it ends the order about the same thing."""
    is_carried_out: bool = False
    """Whether what it changes at once has been changed. An order that is given while no coordinator runs is
    carried out by the next one."""
    answer: str = ""
    """The learner's; empty: none yet, or the order is not for it."""
    is_refused: bool = False
    """Whether the learner has refused it."""
    held: str = ""
    """For a setting, the value that holds until the learner takes this one, as JSON; empty: the
    configuration's."""

    @property
    def key(self) -> str:
        return f"{self.verb} {self.about}".rstrip()

    @property
    def holds(self) -> bool:
        """Whether it says what is so now."""
        return not (self.is_undone or self.is_refused)

    @property
    def known_value(self) -> str:
        """The value that the learner is known to have taken, as JSON; empty: the configuration's."""
        if not self.answer or self.is_refused:
            return self.held
        return "" if self.is_undone else self.value

    @property
    def origin(self) -> str:
        """Who gave it, and why."""
        by = f"by {self.by}" if self.by else "by an operator"
        return f"{by}: {self.because}" if self.because else by

    @property
    def remark(self) -> str:
        """When it was given, who gave it, and why."""
        return f"{moment(self.at_s)} {self.origin}" if self.at_s else self.origin

    def for_s(self, now: float) -> float:
        """Return how long it has stood; 0 where that is not known."""
        return max(0.0, now - self.at_s) if self.at_s else 0.0

    def __str__(self) -> str:
        if self.is_undone:
            return f"{self.verb} --undo {self.about}"
        return f"{self.verb} {self.about}={self.value}" if self.about else f"{self.verb} {self.value}"


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """The learner's answer to an order."""

    order_id: str
    answer: str
    """For people: the outcome, or why it is refused."""
    is_refused: bool = False
