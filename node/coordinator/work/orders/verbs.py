"""The verbs of operators' orders, a row each; pure.

A row has everything that is particular to a verb: its command's words and arguments, and what it changes at
once. What an order means for as long as it holds is asked of ``orders.Orders`` where it matters.

    pause, drain          asked at each request for leases        set, rollback   sent to the learner
    revoke                asked at each call, and carried out      move            handed on with answers
    pardon                carried out
"""

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from node.coordinator.work.orders.orders import FOR_LEARNER
from node.values.operator_order import (
    DRAIN,
    EVERYBODY,
    MOVE,
    PARDON,
    PAUSE,
    REVOKE,
    ROLLBACK,
    SET,
)

if TYPE_CHECKING:
    from node.coordinator.work.accounts import Accounts
    from node.coordinator.work.balance import Transaction


class Takes(enum.Enum):
    """The arguments of a verb's command."""

    NOTHING = enum.auto()
    NODES = enum.auto()
    SAMPLERS = enum.auto()
    SETTINGS = enum.auto()
    VERSION = enum.auto()
    ADDRESSES = enum.auto()


class Repeated(enum.Enum):
    """The fate of an order that holds already, or was given last."""

    LEFT = enum.auto()
    """It stays as it was given first."""
    LEFT_UNLESS_AGAIN = enum.auto()
    """The same, unless the operator adds --again."""
    GIVEN = enum.auto()
    """It is given anew: a deed, and no state."""


Effect = Callable[["Accounts", Collection[str], float], "Transaction"]
"""Returns what orders of a verb change at once, by the accounts, what they are about, and the time."""


def _nothing(accounts: "Accounts", about: Collection[str], now: float) -> "Transaction":
    from node.coordinator.work.balance import Transaction

    return Transaction()


def _revoked(accounts: "Accounts", about: Collection[str], now: float) -> "Transaction":
    from node.coordinator.work.decisions.trust import revocation

    return revocation(accounts, about, now=now).transaction


def _pardoned(accounts: "Accounts", about: Collection[str], now: float) -> "Transaction":
    from node.coordinator.work.decisions.trust import pardon

    return pardon(accounts, None if EVERYBODY in about else about, now=now).transaction


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb; ``{about}`` and ``{dir}`` in its sentences stand for what it is about and --state-dir."""

    name: str
    help: str
    example: str
    given: str
    """The command's answer once the order holds."""
    takes: Takes = Takes.NOTHING
    undoes: str = ""
    """The verb whose order it ends; empty: it gives one of its own."""
    undo_help: str = ""
    """Help of --undo; empty: there is none."""
    undone: str = ""
    nobody: str = ""
    """The answer of --list where no order holds; empty: there is no --list."""
    takes_everybody: bool = False
    repeated: Repeated = Repeated.LEFT
    not_about: Mapping[str, str] | None = None
    """Ids that it cannot be about, and why."""
    effect: Effect = _nothing

    @property
    def is_for_learner(self) -> bool:
        return self.name in FOR_LEARNER


_VERBS: Final = (
    Verb(
        REVOKE,
        "shut a node out of the run, or let it in again",
        """\
  heterorl-node revoke sampler-3 --state-dir runs/first --because "its disk was sold"
  heterorl-node revoke --list --state-dir runs/first
  heterorl-node revoke --undo sampler-3 --state-dir runs/first
The coordinator ends the node's streams within 5 s, and relays follow at their next heartbeat. No token lets
the name in again.
""",
        given="shut out: {about}. To undo: heterorl-node revoke --undo {about} --state-dir {dir}",
        takes=Takes.NODES,
        undo_help="let the nodes in again",
        undone="let in again: {about}, with the certificate from before or a new token",
        nobody="no node is shut out",
        not_about={"coordinator": "the coordinator keeps this list and cannot be shut out by it"},
        effect=_revoked,
    ),
    Verb(
        PAUSE,
        "lease nothing more, until resumed; what is begun is finished",
        """\
  heterorl-node pause --state-dir runs/first --because "the judge is down"
  heterorl-node resume --state-dir runs/first
Groups that are begun are finished, submitted and, as far as they fill batches, trained on. The pause survives
restarts; `heterorl-node status` says since when.
""",
        given="paused. To lease again: heterorl-node resume --state-dir {dir}",
    ),
    Verb(
        "resume",
        "end a pause",
        """\
  heterorl-node resume --state-dir runs/first
Drained samplers stay drained.
""",
        given="resumed: samplers are leased to again, within a second",
        undoes=PAUSE,
    ),
    Verb(
        MOVE,
        "tell all peers where the coordinator will be",
        """\
  heterorl-node move --to hub2.example.net:7700 --state-dir runs/first
Peers hear of it with their next heartbeats and keep it. When `heterorl-node status` shows no peer silent,
stop the coordinator, copy DIR/coordinator to the new machine, start it there, and leave no copy that could be
started: two coordinators with one ledger would hand out the same prompts.
""",
        given="Peers are told with their next heartbeats that the coordinator moves. Then: stop it, copy "
        "{dir}/coordinator, start it there, and never start this copy again.",
        takes=Takes.ADDRESSES,
        repeated=Repeated.GIVEN,
    ),
    Verb(
        DRAIN,
        "give a sampler no more leases, so that it can be stopped",
        """\
  heterorl-node drain sampler-3 --state-dir runs/first --because "moves to another rack"
  heterorl-node status --state-dir runs/first --coordinator 127.0.0.1:7700 --name sampler-3
  heterorl-node drain --undo sampler-3 --state-dir runs/first
It finishes what it holds. Once the status shows no leases of it, it may be stopped.
""",
        given="no more leases from now on, and what is held is finished: {about}\n"
        "To undo: heterorl-node drain --undo {about} --state-dir {dir}",
        takes=Takes.SAMPLERS,
        undo_help="lease to them again",
        undone="leased to again, within a second: {about}",
        nobody="no sampler is drained",
        not_about={EVERYBODY: "everybody is a pause: use heterorl-node pause, or resume"},
    ),
    Verb(
        PARDON,
        "ask again what a sampler failed, hold nothing against it",
        """\
  heterorl-node pardon sampler-3 --state-dir runs/first
  heterorl-node pardon all --state-dir runs/first
Prompts that were kept back on a sampler's word are leased again, its failures are forgotten and a quarantine
ends. To take back the word of a sampler and keep it out, revoke it instead.
""",
        given="pardoned: {about}",
        takes=Takes.SAMPLERS,
        takes_everybody=True,
        repeated=Repeated.GIVEN,
        effect=_pardoned,
    ),
    Verb(
        ROLLBACK,
        "go on from an earlier version, under a new number",
        """\
  heterorl-node rollback 140 --state-dir runs/first --because "reward fell after 150"
The learner's next version gets the weights of version 140, as samplers had them, and a new number. Samplers
fetch it like any other. The optimizer begins anew, without moments. Groups that were sampled before are
refused as stale, and their prompts are leased again. 0 is the base model. A learner does this between two
steps; one that is away does it when it is back. The same order given twice is carried out once; --again
repeats it.
""",
        given="ordered: the learner's next version gets the weights of version {value}",
        takes=Takes.VERSION,
        repeated=Repeated.LEFT_UNLESS_AGAIN,
    ),
    Verb(
        SET,
        "change the learning rate, a clip bound or the like of a running learner",
        """\
  heterorl-node set learner.learning_rate=5e-7 --state-dir runs/first --because "KL climbs"
  heterorl-node set learner.objective_options.clip_high=0.1 --state-dir runs/first
  heterorl-node set --undo learner.learning_rate --state-dir runs/first
  heterorl-node set --list --state-dir runs/first
A value holds in place of the configuration's, also after restarts, until it is undone. A running learner
takes its next step with it. That step's line in steps.jsonl names the change, and `heterorl-node status`
shows it for a day as unusual. The learner refuses a key that cannot change in a run; it names those that can.
""",
        given="ordered: {about}",
        takes=Takes.SETTINGS,
        undo_help="let the configuration's values hold again",
        undone="ordered: the configuration's value of {about}",
        nobody="no setting differs from the configuration",
    ),
)

VERBS: Final = {verb.name: verb for verb in _VERBS}
