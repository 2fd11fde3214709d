"""Entry point for torchrun: the daemon on the first rank, followers on the others."""

import os
import sys

if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")) == 0:
        from node.commands.cli import main as daemon

        code = daemon()
    else:
        from learner.ranks.follower import main as follower

        code = follower()
    # Threads that wait for the first rank keep nobody.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
