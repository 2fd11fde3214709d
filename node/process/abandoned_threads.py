"""Threads that nothing can end, because they hang in native code: the process ends without them.

Python waits for the threads of executors before it exits, and has no way to end one.
"""

import logging
import os
import sys
from typing import Final

logger = logging.getLogger(__name__)

_abandoned: Final[list[str]] = []


def abandon(name: str) -> None:
    """Note that a thread does not return; ``exit_without_them`` then ends the process at once."""
    _abandoned.append(name)


def exit_without_them(exit_code: int) -> None:
    """End the process if threads were abandoned. Call it last: nothing is cleaned up after it."""
    if _abandoned:
        logger.error("process ended without its threads", extra={"threads": _abandoned})
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
