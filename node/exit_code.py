"""The exit code of a process: what each means, and which one an error leads to."""

import enum
from collections.abc import Iterable

from node.errors import ConfigError, DeposedError, Reason, RefusedError


class ExitCode(enum.IntEnum):
    """How a process ends. docs/operating.md has a line on each."""

    DRAINED = 0
    FAILED = 1
    CONFIGURATION = 2
    COULD_NOT_START = 3
    DEPOSED = 4


def exit_code_of_faults(faults: Iterable[Exception]) -> ExitCode:
    """Return the exit code of a process that these faults kept from starting."""
    has_config_error = any(isinstance(fault, ConfigError) for fault in faults)
    return ExitCode.CONFIGURATION if has_config_error else ExitCode.COULD_NOT_START


def exit_code_of_failure(error: Exception, *, was_serving: bool) -> ExitCode:
    """Return the exit code of a daemon whose service raised ``error``, before or after all were ready.

    A sampler may hear that its model is not the run's only after it is ready, once the learner has joined.
    """
    if isinstance(error, DeposedError):
        return ExitCode.DEPOSED
    is_another_model = isinstance(error, RefusedError) and error.reason is Reason.BASE_MISMATCH
    return ExitCode.FAILED if was_serving and not is_another_model else exit_code_of_faults([error])
