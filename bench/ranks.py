"""A learner's step on 1, 2 and 4 ranks of this host: its memory beside what ``plan`` says of it.

    python -m bench.ranks                     minutes, on a quiet machine
    python -m bench.ranks --size small        27 million parameters, two rounds
    python -m bench.ranks --size tiny         seconds

One JSON line a figure. Ranks are processes on gloo with one thread each; times on fewer cores than ranks say
nothing of more cores.

    layout          `dp_shard` or `tp`, for train_step with the default objective
    seconds         median over rounds, of the slowest rank
    peak_bytes      largest resident memory of any rank during steps, beyond that before there was a model
    planned_bytes   what `heterorl-node plan` says of the same; held_share: of parameters, on the fullest rank
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing

from bench.learner.steps import Ours, Shape, make_groups, make_model
from bench.shared.measure import resident_bytes, restart_peak, return_freed_memory
from learner.model.model import load_policy
from learner.model.rank_exchanges import ONE_RANK, Ranks
from learner.ranks.rank_group import RankGroup
from learner.sizing.mesh_sizes import MeshSizes
from learner.sizing.model_shape import ModelShape
from learner.sizing.rank_costs import RankLayout, rank_memory

SHAPES: Final[Mapping[str, Shape]] = {
    "large": Shape("32 768, width 512, 8 layers", 32_768, 512, 8, 4, 8, 8, 56, rounds=7),
    "small": Shape("16 384, width 512, 6 layers", 16_384, 512, 6, 2, 8, 16, 48, rounds=2),
    "tiny": Shape("1024, width 64, 2 layers", 1024, 64, 2, 2, 4, 8, 8, rounds=2),
}
LAYOUTS: Final = ("dp_shard", "tp")
LIMIT: Final = timedelta(minutes=30)


def step_lines(model_dir: Path, shape: Shape, *, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Return a line for each layout of each number of ranks; ``model_dir`` has the shape's model."""
    sizes = ModelShape.of_config(json.loads((model_dir / "config.json").read_text()), name=shape.name)
    for count in ranks:
        for layout in LAYOUTS:
            is_tp = layout == "tp"
            if is_tp and (count == 1 or sizes.heads % count or sizes.kv_heads % count):
                continue
            told = _on_ranks(count, layout, model_dir, shape)
            tp, dp_shard = (count, 1) if is_tp else (1, count)
            read = shape.groups * shape.prompt_tokens + shape.rows * (shape.completion_tokens - 1)
            costs = RankLayout(dp_shard=dp_shard, tp=tp, micro_batch_tokens=-(-read // dp_shard))
            planned = sum(rank_memory(sizes, costs, compute_bytes=4).values())
            line = {"kind": shape.name, "layout": layout, "ranks": count}
            yield line | told | {"planned_bytes": round(planned)}


def _on_ranks(ranks: int, layout: str, model_dir: Path, shape: Shape) -> dict[str, Any]:
    """Take steps on as many ranks; return what the first one told."""
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "figures"
        torch.multiprocessing.spawn(  # type: ignore[no-untyped-call, attr-defined]
            _rank, args=(ranks, told, layout, model_dir, shape), nprocs=ranks
        )
        figures: dict[str, Any] = json.loads(told.read_text())
    return figures


def _rank(rank: int, ranks: int, told: Path, layout: str, model_dir: Path, shape: Shape) -> None:
    torch.set_num_threads(1)
    meets_at = f"file://{told}-ranks"
    dist.init_process_group("gloo", init_method=meets_at, rank=rank, world_size=ranks, timeout=LIMIT)
    figures = _measured(layout, model_dir, shape)
    if rank == 0:
        told.write_text(json.dumps(figures))
    dist.destroy_process_group()


def _measured(layout: str, model_dir: Path, shape: Shape) -> dict[str, Any]:
    ranks, before = dist.get_world_size(), resident_bytes()
    sizes = MeshSizes(tp=ranks) if layout == "tp" else MeshSizes(dp_shard=ranks)
    mesh: Ranks = RankGroup(sizes, device_type="cpu") if ranks > 1 else ONE_RANK
    step = Ours(load_policy(model_dir, device="cpu", ranks=mesh), make_groups(shape))
    took = []
    for _ in range(shape.rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        took.append(time.perf_counter() - started)
    return_freed_memory()  # from here on, which costs time
    step()
    restart_peak()
    step()
    peak = resident_bytes(highest=True) - before
    parts = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in step.model.parameters()]
    whole = sum(parameter.numel() for parameter in step.model.parameters())
    figures = torch.tensor([statistics.median(took[1:]), peak, sum(p.numel() for p in parts) / whole])
    figures = figures.double()
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    seconds, peak_bytes, held = figures.tolist()
    return {"seconds": round(seconds, 5), "peak_bytes": int(peak_bytes), "held_share": round(held, 4)}


def main(given: Sequence[str] | None = None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SHAPES, default="large", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="default: %(default)s")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    shape = SHAPES[options.size]
    with tempfile.TemporaryDirectory() as directory:
        make_model(shape).save_pretrained(directory)
        for line in step_lines(Path(directory), shape, ranks=options.ranks):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
