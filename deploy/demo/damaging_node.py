"""``python -m deploy.demo.damaging_node``: a node that flips a bit in the first weights it serves, then none.

The environment variable HETERORL_DEMO_DAMAGES says in how many messages.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from node.commands.cli import main
from node.policy import ArtifactKey
from node.serving.policy_servicer import PolicyServicer

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


def _damage_what_is_served(damage: Callable[[bytes], bytes]) -> None:
    read = PolicyServicer.read

    def damaged(self: PolicyServicer, key: ArtifactKey, frames: Sequence[int]) -> bytes:
        return damage(read(self, key, frames))

    PolicyServicer.read = damaged  # type: ignore[method-assign]


if __name__ == "__main__":
    _damage_what_is_served(damage_first(int(os.environ.pop(VARIABLE))))
    sys.exit(main())
