"""Every way a peer can be refused, and every way the daemon can fail to start.

A refusal answers bad input: it has a reason from a closed list, is counted under that reason and sent to
the peer with the values and the fix; the process goes on serving. The others end a process at its start
(``node.exit_code``).

    HeteroRLError
    |-- RefusedError        a peer's request or payload breaks a rule; has a Reason
    |-- ConfigError         exit 2: a key has a value its rule forbids
    |-- StartupError        exit 3: the configuration is right but the world is not
    |-- DeposedError        exit 4: another coordinator leads the run
    `-- NotReadyError       several of the latter two at once
"""

import enum
from typing import Final, Protocol, Self


class HeteroRLError(Exception):
    """Anything this project raises on purpose."""


class Recovery(enum.Enum):
    """A peer's reaction to a refusal."""

    WAIT = enum.auto()
    """Send the same request again after a backoff."""
    REPLAN = enum.auto()
    """Join again, or plan again from a new announcement; then ask for something else."""
    DROP_REQUEST = enum.auto()
    """Abandon this request. Others may succeed."""
    STOP = enum.auto()
    """End: nothing this peer sends is taken before its configuration or identity changes."""
    UNDECIDED = enum.auto()
    """The reason alone does not tell; the caller decides."""


class Reason(enum.StrEnum):
    """Why something was refused. Closed: also the ``reason`` label of refusal counters."""

    status: str
    """Name of the gRPC status the refusal travels as (a name, so that this file needs no grpc)."""
    recovery: Recovery
    """The reaction of a peer that was refused for this reason."""

    def __new__(cls, value: str, status: str, recovery: Recovery = Recovery.UNDECIDED) -> Self:
        reason = str.__new__(cls, value)
        reason._value_, reason.status, reason.recovery = value, status, recovery
        return reason

    MALFORMED = "malformed", "INVALID_ARGUMENT", Recovery.DROP_REQUEST
    OVER_LIMIT = "over_limit", "RESOURCE_EXHAUSTED", Recovery.DROP_REQUEST
    NON_FINITE = "non_finite", "INVALID_ARGUMENT"
    UNAUTHENTICATED = "unauthenticated", "UNAUTHENTICATED", Recovery.STOP
    REVOKED = "revoked", "UNAUTHENTICATED", Recovery.STOP  # by an operator, so it is no sign of an attack
    EXPIRED = (
        "expired",
        "UNAUTHENTICATED",
        Recovery.WAIT,
    )  # by the hub's clock, which may be the wrong one: see clock_comparison
    WRONG_ROLE = "wrong_role", "PERMISSION_DENIED", Recovery.STOP
    WRONG_PORT = "wrong_port", "UNIMPLEMENTED"
    TOKEN_REFUSED = "token_refused", "PERMISSION_DENIED"
    FOREIGN_RUN = "foreign_run", "FAILED_PRECONDITION", Recovery.STOP
    PROTOCOL_MISMATCH = "protocol_mismatch", "FAILED_PRECONDITION", Recovery.STOP
    LAYOUT_MISMATCH = "layout_mismatch", "FAILED_PRECONDITION", Recovery.STOP
    TOKENIZER_MISMATCH = "tokenizer_mismatch", "FAILED_PRECONDITION", Recovery.STOP
    BASE_MISMATCH = "base_mismatch", "FAILED_PRECONDITION", Recovery.STOP
    TASK_MISMATCH = "task_mismatch", "FAILED_PRECONDITION", Recovery.STOP
    NOT_JOINED = "not_joined", "FAILED_PRECONDITION", Recovery.REPLAN
    NAME_IN_USE = "name_in_use", "ALREADY_EXISTS", Recovery.REPLAN
    FENCED = "fenced", "FAILED_PRECONDITION", Recovery.STOP
    UNKNOWN_VERSION = "unknown_version", "NOT_FOUND", Recovery.REPLAN
    ROLLBACK = "rollback", "FAILED_PRECONDITION", Recovery.STOP
    LEDGER_BEHIND = "ledger_behind", "FAILED_PRECONDITION", Recovery.STOP
    BAD_SIGNATURE = "bad_signature", "PERMISSION_DENIED", Recovery.STOP
    DAMAGED = "damaged", "DATA_LOSS", Recovery.WAIT
    WRONG_BASE = "wrong_base", "FAILED_PRECONDITION"
    DUPLICATE = "duplicate", "ALREADY_EXISTS"
    BUSY = "busy", "UNAVAILABLE", Recovery.WAIT
    TOO_OFTEN = "too_often", "RESOURCE_EXHAUSTED", Recovery.WAIT
    DRAINING = "draining", "UNAVAILABLE", Recovery.WAIT
    STANDBY = "standby", "UNAVAILABLE", Recovery.WAIT  # another coordinator of the run leads
    DISK = "disk", "UNAVAILABLE", Recovery.WAIT
    INTERNAL = "internal", "INTERNAL"

    @property
    def is_suspicious(self) -> bool:
        """Whether an honest, current peer gives no cause for it; the alert Refusals counts these."""
        return self in _SUSPICIOUS

    @property
    def is_retryable(self) -> bool:
        """Whether the same peer may succeed later: by waiting, joining or planning again."""
        return self.recovery in (Recovery.WAIT, Recovery.REPLAN)


_SUSPICIOUS = frozenset(
    {
        Reason.UNAUTHENTICATED,
        Reason.EXPIRED,
        Reason.TOKEN_REFUSED,
        Reason.WRONG_ROLE,
        Reason.FOREIGN_RUN,
        Reason.FENCED,
        Reason.ROLLBACK,
        Reason.BAD_SIGNATURE,
        Reason.DAMAGED,
        Reason.TOO_OFTEN,
    }
)


class CountRefusal(Protocol):
    """Counts a refusal under its reason, as ``NodeMetrics.count_refusal`` does."""

    def __call__(self, *, service: str, reason: Reason) -> None: ...


class RefusedError(HeteroRLError):
    """A request or payload breaks a rule. ``str()`` is sent to its sender.

    ``is_remote``: a hub refused this peer, rather than this peer what it was sent. ``hub_now_s`` is the time
    on that hub's clock, where it came with the refusal.
    """

    def __init__(
        self,
        reason: Reason,
        what: str,
        *,
        fix: str = "",
        is_remote: bool = False,
        hub_now_s: float | None = None,
    ) -> None:
        super().__init__(f"{what}; {fix}" if fix else what)
        self.reason = reason
        self.what = what
        self.fix = fix
        self.is_remote = is_remote
        self.hub_now_s = hub_now_s


COMMAND_LINE: Final = "the command line"
"""Source of values that are no settings: a command's arguments."""


class ConfigError(HeteroRLError):
    """A configuration value breaks a rule. The daemon exits with 2 before anything is loaded."""

    def __init__(self, *, key: str, value: object, source: str, rule: str, fix: str) -> None:
        super().__init__(f"{key} = {value!r} (from {source}): {rule}. {fix}")
        self.key = key
        self.value = value
        self.source = source
        self.rule = rule
        self.fix = fix


class StartupError(HeteroRLError):
    """The configuration is valid, but the daemon could not start with it. Exits with 3."""

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(f"{what}. {fix}")
        self.what = what
        self.fix = fix


class DeposedError(HeteroRLError):
    """The coordinator leads no longer, or cannot tell whether it does. Started again, it stands by."""


class NotReadyError(HeteroRLError):
    """A process cannot start as it is configured; ``faults`` has everything that is wrong."""

    def __init__(self, faults: tuple[ConfigError | StartupError, ...]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults
