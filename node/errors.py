"""Every way a peer can be refused, and every way the daemon can fail to start.

A refusal is an answer to bad input: it has a reason from a closed list, is counted under
that reason, told to the sender with the values and the fix, and leaves the process serving.
Start-up errors end the process with an exit code of their own.

    HeteroRLError
    |-- RefusedError        a peer's request or payload breaks a rule; has a Reason
    |-- ConfigError         exit 2: a key has a value its rule forbids
    `-- StartupError        exit 3: the configuration is right but the world is not
"""

import enum
from typing import Final, Protocol


class HeteroRLError(Exception):
    """Anything this project raises on purpose."""


class Reason(enum.StrEnum):
    """Why something was refused. Closed: also the ``reason`` label of refusal counters."""

    MALFORMED = "malformed"
    OVER_LIMIT = "over_limit"
    NON_FINITE = "non_finite"
    UNAUTHENTICATED = "unauthenticated"
    EXPIRED = "expired"
    WRONG_ROLE = "wrong_role"
    WRONG_PORT = "wrong_port"
    TOKEN_REFUSED = "token_refused"
    FOREIGN_RUN = "foreign_run"
    LAYOUT_MISMATCH = "layout_mismatch"
    TOKENIZER_MISMATCH = "tokenizer_mismatch"
    TASK_MISMATCH = "task_mismatch"
    NOT_JOINED = "not_joined"
    NAME_IN_USE = "name_in_use"
    FENCED = "fenced"
    LEASE_LOST = "lease_lost"
    UNKNOWN_VERSION = "unknown_version"
    ROLLBACK = "rollback"
    LEDGER_BEHIND = "ledger_behind"
    BAD_SIGNATURE = "bad_signature"
    DAMAGED = "damaged"
    WRONG_BASE = "wrong_base"
    STALE = "stale"
    DUPLICATE = "duplicate"
    BUSY = "busy"
    DRAINING = "draining"
    DISK = "disk"
    INTERNAL = "internal"

    @property
    def recovery(self) -> "Recovery":
        """What a peer that was refused for this reason does next."""
        return _RECOVERY.get(self, Recovery.UNDECIDED)

    @property
    def is_retryable(self) -> bool:
        """Whether the same peer may succeed later: by waiting, joining or planning again."""
        return self.recovery in (Recovery.WAIT, Recovery.REPLAN)


class Recovery(enum.Enum):
    """What a peer does after a refusal."""

    WAIT = enum.auto()
    """Send the same request again after a backoff."""
    REPLAN = enum.auto()
    """Join again, or plan again from a new announcement; then ask for something else."""
    DROP_REQUEST = enum.auto()
    """Give this request up. Others may be taken."""
    STOP = enum.auto()
    """End: nothing this peer sends is taken before its configuration or identity changes."""
    UNDECIDED = enum.auto()
    """The reason alone does not tell; the caller decides."""


class CountRefusal(Protocol):
    """Counts a refusal under its reason, as ``NodeMetrics.count_refusal`` does."""

    def __call__(self, *, service: str, reason: Reason) -> None: ...


STATUS_OF_REASON: Final[dict[Reason, str]] = {
    Reason.MALFORMED: "INVALID_ARGUMENT",
    Reason.OVER_LIMIT: "RESOURCE_EXHAUSTED",
    Reason.NON_FINITE: "INVALID_ARGUMENT",
    Reason.UNAUTHENTICATED: "UNAUTHENTICATED",
    Reason.EXPIRED: "UNAUTHENTICATED",
    Reason.WRONG_ROLE: "PERMISSION_DENIED",
    Reason.WRONG_PORT: "UNIMPLEMENTED",
    Reason.TOKEN_REFUSED: "PERMISSION_DENIED",
    Reason.FOREIGN_RUN: "FAILED_PRECONDITION",
    Reason.LAYOUT_MISMATCH: "FAILED_PRECONDITION",
    Reason.TOKENIZER_MISMATCH: "FAILED_PRECONDITION",
    Reason.TASK_MISMATCH: "FAILED_PRECONDITION",
    Reason.NOT_JOINED: "FAILED_PRECONDITION",
    Reason.NAME_IN_USE: "ALREADY_EXISTS",
    Reason.FENCED: "FAILED_PRECONDITION",
    Reason.LEASE_LOST: "ABORTED",
    Reason.UNKNOWN_VERSION: "NOT_FOUND",
    Reason.ROLLBACK: "FAILED_PRECONDITION",
    Reason.LEDGER_BEHIND: "FAILED_PRECONDITION",
    Reason.BAD_SIGNATURE: "PERMISSION_DENIED",
    Reason.DAMAGED: "DATA_LOSS",
    Reason.WRONG_BASE: "FAILED_PRECONDITION",
    Reason.STALE: "FAILED_PRECONDITION",
    Reason.DUPLICATE: "ALREADY_EXISTS",
    Reason.BUSY: "UNAVAILABLE",
    Reason.DRAINING: "UNAVAILABLE",
    Reason.DISK: "UNAVAILABLE",
    Reason.INTERNAL: "INTERNAL",
}
"""Name of the gRPC status each refusal travels as (names, so that this file needs no grpc)."""

_RECOVERY: Final[dict[Reason, Recovery]] = {
    Reason.BUSY: Recovery.WAIT,
    Reason.DRAINING: Recovery.WAIT,
    Reason.DISK: Recovery.WAIT,
    Reason.DAMAGED: Recovery.WAIT,
    Reason.EXPIRED: Recovery.WAIT,  # by the hub's clock, which may be the wrong one: see clock_comparison
    Reason.NOT_JOINED: Recovery.REPLAN,
    Reason.NAME_IN_USE: Recovery.REPLAN,
    Reason.UNKNOWN_VERSION: Recovery.REPLAN,
    Reason.MALFORMED: Recovery.DROP_REQUEST,
    Reason.OVER_LIMIT: Recovery.DROP_REQUEST,
    Reason.UNAUTHENTICATED: Recovery.STOP,
    Reason.WRONG_ROLE: Recovery.STOP,
    Reason.FOREIGN_RUN: Recovery.STOP,
    Reason.LAYOUT_MISMATCH: Recovery.STOP,
    Reason.TOKENIZER_MISMATCH: Recovery.STOP,
    Reason.TASK_MISMATCH: Recovery.STOP,
    Reason.FENCED: Recovery.STOP,
    Reason.ROLLBACK: Recovery.STOP,
    Reason.LEDGER_BEHIND: Recovery.STOP,
    Reason.BAD_SIGNATURE: Recovery.STOP,
}


class RefusedError(HeteroRLError):
    """A request or payload breaks a rule. ``str()`` is what the sender is told.

    ``hub_now_s`` is the time on the refusing hub's clock, where it came with the refusal.
    """

    def __init__(self, reason: Reason, what: str, *, fix: str = "", hub_now_s: float | None = None) -> None:
        super().__init__(f"{what}; {fix}" if fix else what)
        self.reason = reason
        self.what = what
        self.fix = fix
        self.hub_now_s = hub_now_s


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


class ExitCode(enum.IntEnum):
    """How the daemon ends. README.md has a line on each."""

    DRAINED = 0
    FAILED = 1
    CONFIGURATION = 2
    COULD_NOT_START = 3
