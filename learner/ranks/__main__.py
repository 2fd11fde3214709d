"""Entry point for torchrun, in place of heterorl-node: the daemon on the first rank, followers on others."""

import logging
import os
import sys
import threading

from learner.ranks.environment import STORE_PORT


def _end_with_the_daemon() -> None:
    """End this process when the one that started it has: its end of the pipe is closed then."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    logging.getLogger("learner.ranks").error("this rank ends: the first one has")
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")) == 0:
        from node.commands.cli import main as daemon

        code = daemon()

        from node.process.process_end import PROCESS_END

        PROCESS_END.finish()
    else:
        from node.system.descriptors import fill_standard_descriptors
        from node.telemetry.logging import configure_process_logging

        fill_standard_descriptors()
        rank = f"learner rank {os.environ['RANK']}"
        configure_process_logging(log_format="auto", level="info", roles=[rank])
        if STORE_PORT in os.environ:
            # From the first moment: until ranks have met, no connection tells that one is gone.
            threading.Thread(target=_end_with_the_daemon, daemon=True).start()
        from learner.ranks.follower import main as follower

        code = follower()
    # Threads that wait for the first rank keep nobody.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
