"""The exit code of a process: what each means, and which one an error leads to.

The one list of them: ``heterorl-node --help`` prints it, and a test holds docs/operating.md to it.
"""

import enum
from collections.abc import Iterable
from typing import Final, Self

from node.errors import ConfigError, DeposedError, Reason, RefusedError


class ExitCode(enum.IntEnum):
    """How a process ends."""

    meaning: str
    """For people, in one line."""

    def __new__(cls, value: int, meaning: str) -> Self:
        code = int.__new__(cls, value)
        code._value_, code.meaning = value, meaning
        return code

    DRAINED = 0, "drained: SIGTERM, SIGINT, SIGHUP (unless ignored, as under nohup), or the work was done"
    FAILED = 1, "failed while running, or was late to drain; of a command: the answer is no"
    CONFIGURATION = 2, "the configuration or an argument is wrong, or needs a package that is not installed"
    COULD_NOT_START = (
        3,
        "could not start, or a command could not do it: a port is taken, another process has the state "
        "directory, a certificate is missing or expired, a file is not there, "
        "the model, the tokenizer or the grader is not the run's",
    )
    DEPOSED = 4, "another coordinator of the run leads, or the ledger's database was lost for a moment"
    SHUT_OUT = 5, "shut out until an operator acts: this node was revoked, or a newer learner has taken over"


_OTHER_FILES: Final = frozenset(
    {Reason.BASE_MISMATCH, Reason.LAYOUT_MISMATCH, Reason.TOKENIZER_MISMATCH, Reason.TASK_MISMATCH}
)
"""Refusals of a peer whose model, tokenizer or grader is not the run's."""


def exit_code_of_faults(faults: Iterable[Exception]) -> ExitCode:
    """Return the exit code of a process that these faults kept from starting."""
    has_config_error = any(isinstance(fault, ConfigError) for fault in faults)
    return ExitCode.CONFIGURATION if has_config_error else ExitCode.COULD_NOT_START


def exit_code_of_failure(error: Exception, *, was_serving: bool) -> ExitCode:
    """Return the exit code of a daemon whose service raised ``error``, before or after all were ready.

    A peer may hear that its model, its tokenizer or its grader is not the run's only after it is ready, once
    the learner has joined.
    """
    if isinstance(error, DeposedError):
        return ExitCode.DEPOSED
    if isinstance(error, RefusedError) and error.reason in (Reason.REVOKED, Reason.FENCED):
        return ExitCode.SHUT_OUT
    has_other_files = isinstance(error, RefusedError) and error.reason in _OTHER_FILES
    return ExitCode.FAILED if was_serving and not has_other_files else exit_code_of_faults([error])
