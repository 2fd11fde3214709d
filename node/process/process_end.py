"""The end of a daemon's process, said when it is one: "stopped", and a moment later its locks are free.

    drained -> executors' threads have ended -> what libraries do at exit -> "stopped" -> end

Python then takes every module apart, for some seconds where torch is one of them, and with the locks of the
state directories still held. Nothing there needs doing: the process ends before.
"""

import atexit
import logging
import os
import sys

logger = logging.getLogger(__name__)


class ProcessEnd:
    """Ends the process once Python has waited for its threads, with the exit code that was told."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """None: the process ends in another way, such as by an exception."""

    def register(self) -> None:
        """Come after all that libraries register: what is registered first is called last."""
        atexit.register(self.finish)

    def finish(self) -> None:
        """Say that the process has stopped, and end it; nothing where no exit code was told."""
        if self.exit_code is None:
            return
        logger.info("stopped", extra={"exit_code": self.exit_code})
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)


PROCESS_END = ProcessEnd()
