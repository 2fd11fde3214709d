"""How ranks meet, and what the first one tells the others of its configuration then."""

import json
import os
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from learner.config import LearnerConfig, RanksConfig
from learner.contributor.config import ContributorConfig
from learner.model.rank_exchanges import Instruction
from learner.ranks.environment import LIMIT_S, STORE_PORT
from learner.sizing.mesh_sizes import MeshSizes
from node.errors import StartupError

LOOPBACK: Final = "127.0.0.1"


def coding_threads(config: RanksConfig) -> int:
    """Return how many threads of this rank code a version: as many as compute, if nothing is configured."""
    threads = config.publish_threads if isinstance(config, LearnerConfig) else 0
    return threads or config.threads or torch.get_num_threads()


def check_world_size(processes: int, sizes: MeshSizes) -> None:
    """Check that torchrun started as many processes as the mesh has ranks.

    Raises:
        StartupError: it did not.
    """
    if processes != sizes.ranks:
        raise StartupError(
            f"torchrun started {processes} processes, the mesh ({sizes}) has {sizes.ranks} ranks",
            fix=f"Start {sizes.ranks}, or change pp, dp_replicate, dp_shard and tp.",
        )


def join_ranks(
    store: TCPStore | None = None, *, ranks: int | None = None, limit_s: float | None = None
) -> None:
    """Meet the other ranks where the environment says: at the daemon that started this one, or torchrun's.

    Args:
        store: of the first rank, which started the others.
    """
    limit = timedelta(seconds=limit_s or float(os.environ.get(LIMIT_S, "600")))
    rank = 0
    if store is None:
        if (port := os.environ.get(STORE_PORT)) is None:
            dist.init_process_group(_backends(), timeout=limit)
            return
        store = TCPStore(LOOPBACK, int(port), wait_for_workers=False, timeout=limit)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert ranks is not None
    dist.init_process_group(_backends(), store=store, rank=rank, world_size=ranks, timeout=limit)


def begin(config: RanksConfig) -> Instruction:
    """Return the configuration as the first rank tells it."""
    values = json.loads(json.dumps(config.model_dump(), default=str))
    return Instruction("begin", {"section": config.section, "config": values})


def config_of(begun: Instruction) -> RanksConfig:
    """Return the configuration that the first rank tells."""
    kind = next(one for one in (LearnerConfig, ContributorConfig) if one.section == begun.values["section"])
    return kind.model_validate(begun.values["config"])


def _backends() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
