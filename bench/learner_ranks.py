"""A learner's step on 1, 2 and 4 ranks of this host, beside a plain FSDP2 loop of torch: one JSON line each.

python -m bench.learner_ranks          minutes, on a quiet machine
python -m bench.learner_ranks --quick  a small model, two rounds

ranks, step     processes on gloo, one thread each; `ours, dp_shard` and `ours, tp` are train_step with the
                default objective; `plain, dp_shard` is the model's own forward under fully_shard, whole
                logits, a mean for a loss, clipping and AdamW, each rank with its share of the rows
seconds         median over rounds, of the slowest rank
rss_bytes       largest resident memory that any rank ever had, in a process of its own
held_share      parameters on the fullest rank, over those of the model
"""

import argparse
import json
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.learner_steps import (
    CLIP_NORM,
    Shape,
    gathered_logprob,
    make_groups,
    make_model,
    make_optimizer,
    padded_ids,
)
from learner.config import LearnerConfig
from learner.ranks.mesh_sizes import MeshSizes
from learner.ranks.rank_group import RankGroup
from learner.training.model import Policy
from learner.training.train_step import StepSettings, train_step

SHAPE: Final = Shape("32 768, width 512, 8 layers", 32_768, 512, 8, 4, 8, 8, 56, rounds=7)
QUICK: Final = Shape("1024, width 64, 2 layers", 1024, 64, 2, 2, 4, 8, 8, rounds=2)
RANKS: Final = (1, 2, 4)
STEPS: Final = ("plain, dp_shard", "ours, dp_shard", "ours, tp")
LIMIT: Final = timedelta(minutes=10)


class PlainSharded:
    """The least that a sharded step does."""

    def __init__(self, shape: Shape) -> None:
        ids = padded_ids(make_groups(shape))
        self._ids = ids[dist.get_rank() :: dist.get_world_size()]
        self._prompt_tokens = shape.prompt_tokens
        self.model = make_model(shape).train(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = make_optimizer(self.model)

    def __call__(self) -> None:
        logprob = gathered_logprob(self.model, self._ids)
        (-logprob[:, self._prompt_tokens - 1 :].mean()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class OursSharded:
    """The learner's step on every rank."""

    def __init__(self, shape: Shape, sizes: MeshSizes) -> None:
        self._groups = make_groups(shape)
        self.model = make_model(shape)
        self._policy = Policy(self.model, ranks=RankGroup(sizes, device_type="cpu"))
        self.optimizer = make_optimizer(self.model)
        config = LearnerConfig(model_dir=Path(), learning_rate=1e-6, gradient_clip_norm=CLIP_NORM)
        self._settings = StepSettings.of(config)

    def __call__(self) -> None:
        train_step(self._policy, self.optimizer, self._groups, version=0, settings=self._settings)


def _run(rank: int, ranks: int, port: int, name: str, shape: Shape, told: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=LIMIT)
    if name.startswith("plain"):
        step: PlainSharded | OursSharded = PlainSharded(shape)
    else:
        sizes = MeshSizes(tp=ranks) if name.endswith("tp") else MeshSizes(dp_shard=ranks)
        step = OursSharded(shape, sizes)
    took = []
    for _ in range(shape.rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        took.append(time.perf_counter() - started)
    parts = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in step.model.parameters()]
    whole = sum(parameter.numel() for parameter in step.model.parameters())
    rss_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = torch.tensor([statistics.median(took[1:]), rss_bytes, sum(p.numel() for p in parts) / whole])
    figures = figures.double()
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    if rank == 0:
        seconds, rss, held = figures.tolist()
        line = {"kind": shape.name, "step": name, "ranks": ranks, "seconds": round(seconds, 5)}
        Path(told).write_text(json.dumps(line | {"rss_bytes": int(rss), "held_share": round(held, 4)}))
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    """Print a line for each step on each number of ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.learner_ranks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds")
    shape = QUICK if parser.parse_args(arguments).quick else SHAPE
    for ranks in RANKS:
        for name in STEPS:
            if name.endswith("tp") and (ranks == 1 or ranks > 2):  # the model has two key-value heads
                continue
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            with tempfile.TemporaryDirectory() as directory:
                told = Path(directory) / "figures"
                torch.multiprocessing.spawn(  # type: ignore[no-untyped-call, attr-defined]
                    _run, args=(ranks, port, name, shape, str(told)), nprocs=ranks
                )
                print(told.read_text(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
