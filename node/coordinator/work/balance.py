"""A ledger's contents, and the changes that one transaction makes to them; values only.

Transaction, Transaction, ... --ledger, accounts--> Balance
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from node.coordinator.work.checks.check_queue import Held
from node.coordinator.work.samplers.sampler_standing import Standing
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot import Slot, SlotBalance
from node.coordinator.work.slots.slot_generations import Generation
from node.coordinator.work.terms.group_check import NotedOptions
from node.coordinator.work.terms.model_check import Learner
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.coordinator.work.version_log import Announced
from node.values.evaluation import Evaluation
from node.values.fact import Fact, Gone, OneFact
from node.values.groups.failure import BadPrompt
from node.values.groups.rollout import EncodedGroup
from node.values.operator_order import Order
from node.values.run import StepRecord

FACTS: Final[tuple[type[Fact], ...]] = (
    Learner,
    DataSeen,
    NotedOptions,
    Generation,
    Tally,
    Standing,
    BadPrompt,
    Evaluation,
    Order,
)
"""The kinds of facts that this software knows. Others are a newer release's, and stay in the ledger."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Changes that become true together or not at all."""

    slots: tuple[Slot, ...] = ()
    stored: EncodedGroup | None = None
    graded: EncodedGroup | None = None
    """One that was stored without rewards, and now takes its own place."""
    kept: frozenset[int] = frozenset()
    """Consumed slots of which the ledger keeps the group's bytes: it is still to be checked."""
    freed: tuple[int, ...] = ()
    """Consumed slots of which it keeps them no longer."""
    steps: tuple[StepRecord, ...] = ()
    """Contiguous, oldest first."""
    announced: tuple[Announced, ...] = ()
    facts: tuple[Fact | Gone, ...] = ()
    """In their order: the last word on a kind and key counts."""

    def of(self, kind: type[OneFact]) -> tuple[OneFact, ...]:
        """Return its facts of a kind."""
        return tuple(fact for fact in self.facts if isinstance(fact, kind))


@dataclass(frozen=True, slots=True)
class Balance:
    """A ledger's contents."""

    slots: SlotBalance = field(default_factory=SlotBalance)
    spooled_at_s: Mapping[int, float] = field(default_factory=dict)
    """By slot, of the groups in the spool."""
    spooled_bytes: Mapping[int, int] = field(default_factory=dict)
    last_step: StepRecord | None = None
    rollbacks: int = 0
    """Versions that an operator's rollback made."""
    announced: tuple[Announced, ...] = ()
    facts: tuple[Fact, ...] = ()
    """Each of a kind in ``FACTS``."""
    unknown_facts: Mapping[str, int] = field(default_factory=dict)
    """How many facts there are of each other kind."""
    accepts_loss: bool = False
    """Whether an operator has accepted the loss before the newest generation, and the learner has not
    reported yet which steps were lost."""
    held_out: tuple[Slot, ...] = ()
    """Held-out slots, open and settled, of the newest evaluations."""
    owed_checks: tuple[Held, ...] = ()
    """Groups of consumed slots that are still to be checked, the oldest first."""

    def of(self, kind: type[OneFact]) -> tuple[OneFact, ...]:
        """Return the facts of a kind."""
        return tuple(fact for fact in self.facts if isinstance(fact, kind))

    def only(self, kind: type[OneFact]) -> OneFact | None:
        """Return the fact of a kind of which a run has one, or None."""
        return next(iter(self.of(kind)), None)

    @property
    def data(self) -> DataSeen:
        return self.only(DataSeen) or NO_DATA

    @property
    def task_digest(self) -> bytes:
        """Digest of the task and the options that its groups were graded by; empty: not noted yet."""
        noted = self.only(NotedOptions)
        return b"" if noted is None else noted.digest
