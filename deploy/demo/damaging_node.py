"""``python -m deploy.demo.damaging_node``: a node that flips a bit in the first weights it serves, then none.

The environment variable HETERORL_DEMO_DAMAGES says in how many messages.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from node.commands.cli import main

VARIABLE: Final = "HETERORL_DEMO_DAMAGES"


def damage_first(count: int) -> Callable[[bytes], bytes]:
    """Return a fault that flips one bit in each of the first ``count`` messages."""
    left = count

    def damage(data: bytes) -> bytes:
        nonlocal left
        if left == 0:
            return data
        left -= 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    return damage


def damage_what_is_served(damage: Callable[[bytes], bytes]) -> None:
    """Damage what every PolicyServicer of this process reads to send."""
    servicer = importlib.import_module("node.serving.policy_servicer").PolicyServicer
    read = servicer.read
    servicer.read = lambda self, *asked, **how: damage(read(self, *asked, **how))


def run() -> Any:
    """Run a node with the faults that the environment asks for."""
    # As in node.commands.cli, before grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    damage_what_is_served(damage_first(int(os.environ.pop(VARIABLE))))
    return main()


if __name__ == "__main__":
    sys.exit(run())
