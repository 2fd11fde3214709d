"""``python -m system.quick_pings`` is ``heterorl-node``, but connections are pinged within seconds."""

import sys
from typing import Final

from node.commands.cli import main
from node.rpc.channel import KEEPALIVE, Keepalive

QUICK: Final = Keepalive(ping_after_s=2.0, give_up_after_s=2.0, allowed_every_s=1.0)

if __name__ == "__main__":
    # It is frozen, and the default of every server and channel: all of a run have the same.
    for name in Keepalive.__slots__:
        object.__setattr__(KEEPALIVE, name, getattr(QUICK, name))
    sys.exit(main())
