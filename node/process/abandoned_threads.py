"""Threads and services that nothing can end: the process ends without them.

Python waits for the threads of executors before it exits, and has no way to end one that hangs in native
code; nor does asyncio end a task that does not heed its cancellation.
"""

import logging
import os
import sys
from typing import Final

logger = logging.getLogger(__name__)

_abandoned: Final[list[str]] = []


def abandon(name: str) -> None:
    """Note that a thread or service does not return; ``exit_without_them`` then ends the process at once."""
    _abandoned.append(name)


def exit_without_them(exit_code: int) -> None:
    """End the process if anything was abandoned. Call it last: nothing is cleaned up after it."""
    if _abandoned:
        logger.error("process ended without what did not return", extra={"abandoned": _abandoned})
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
