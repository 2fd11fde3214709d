"""The ranks that a role's configuration asks for. Most often it is one, which needs no torch.distributed."""

import asyncio
import os
from typing import TYPE_CHECKING

from learner.config import RanksConfig
from learner.model.rank_exchanges import ONE_RANK, Ranks

if TYPE_CHECKING:
    from learner.ranks.launching import Fleet


async def ranks_of(config: RanksConfig) -> "tuple[Fleet | None, Ranks]":
    """Start the other ranks and meet them; return what watches them, None where there are none.

    Raises:
        StartupError: they did not meet.
    """
    if config.mesh.ranks == 1 and "WORLD_SIZE" not in os.environ:
        return None, ONE_RANK
    from learner.ranks.launching import Fleet

    fleet = await asyncio.to_thread(Fleet, config)
    await fleet.met()
    return fleet, fleet.group
