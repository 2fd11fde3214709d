"""A learner's step and life on 1, 2 and 4 ranks of this host, beside a plain FSDP2 loop of torch and TRL.

    python -m bench.learner_ranks                     minutes, on a quiet machine; into bench/results
    python -m bench.learner_ranks --quick             a small model, prints only
    python -m bench.learner_ranks --model DIR --ranks 1 4 --curve 20 --only curve

One JSON line a figure. Ranks are processes on gloo with one thread each.

    step            `ours, dp_shard` and `ours, tp`: train_step with the default objective; `plain, dp_shard`:
                    bench/learner_fsdp.py; `trl`: bench/learner_trl.py, in one process
    seconds         median over rounds, of the slowest rank
    peak_bytes      largest resident memory of any rank during steps, beyond that before there was a model
    planned_bytes   what `heterorl-node plan` says of the same; held_share: of parameters, on the fullest rank
    life            bench/learner_life.py: stall, bytes written, time to resume
    curve           losses of steps on as many batches, and how far each number of ranks is from the first
"""

import argparse
import json
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.learner_fsdp import PlainSharded
from bench.learner_life import EVERY_VERSIONS, life
from bench.learner_memory import return_freed_memory
from bench.learner_report import RANKS_FILE, write_report
from bench.learner_steps import (
    CLIP_NORM,
    Shape,
    groups_of,
    make_model,
    make_optimizer,
    padded_ids,
    step_makers,
)
from bench.measure import resident_bytes, restart_peak
from learner.config import LearnerConfig
from learner.model.model import load_policy
from learner.ranks.rank_group import RankGroup
from learner.sizing.mesh_sizes import MeshSizes
from learner.sizing.model_shape import ModelShape
from learner.sizing.rank_costs import RankLayout, rank_memory
from learner.step.train_step import train_step
from learner.step_settings import StepSettings
from node.values.rollout import RolloutGroup

RESULTS: Final = Path(__file__).parent / "results"

SHAPE: Final = Shape("32 768, width 512, 8 layers", 32_768, 512, 8, 4, 8, 8, 56, rounds=7)
SMALL: Final = Shape("16 384, width 512, 6 layers", 16_384, 512, 6, 2, 8, 16, 48, rounds=2)
QUICK: Final = Shape("1024, width 64, 2 layers", 1024, 64, 2, 2, 4, 8, 8, rounds=2)
STEPS: Final = ("plain, dp_shard", "ours, dp_shard", "ours, tp")
LIMIT: Final = timedelta(minutes=30)
CURVE_RATE: Final = 1e-5
LIFE_RATE: Final = 1e-8
"""A life takes all its steps on one batch, which at more would soon teach nothing."""
PARTS: Final = ("steps", "life", "curve")


class OursSharded:
    """The learner's step on every rank."""

    def __init__(
        self, model_dir: Path, batches: Sequence[Sequence[RolloutGroup]], rate: float, **ranks: Any
    ) -> None:
        self._batches = batches
        self._policy = load_policy(model_dir, device="cpu", **ranks)
        self.model = self._policy.model
        self._optimizer = make_optimizer(self.model, learning_rate=rate)
        config = LearnerConfig(model_dir=model_dir, learning_rate=rate, gradient_clip_norm=CLIP_NORM)
        self._settings = StepSettings.of(config)
        self._number = 0

    def __call__(self) -> float:
        """Take a step on the next batch; return its loss."""
        groups = self._batches[self._number % len(self._batches)]
        outcome = train_step(
            self._policy, self._optimizer, groups, version=self._number, settings=self._settings
        )
        self._number += 1
        return outcome.loss


def batches_of(model: PreTrainedModel, shape: Shape, *, count: int) -> list[list[RolloutGroup]]:
    """Return batches that the model itself wrote; rewarded are tokens with even ids."""
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        prompts = torch.randint(2, shape.vocabulary, (shape.groups, shape.prompt_tokens))
        of_rows = prompts.repeat_interleave(shape.group_size, dim=0)
        length = shape.completion_tokens
        written = model.generate(  # type: ignore[operator]
            of_rows, do_sample=True, top_k=0, min_new_tokens=length, max_new_tokens=length
        )
        tokens = written[:, shape.prompt_tokens :].numpy().astype(np.int32)
        rewards = (tokens % 2 == 0).mean(axis=1)
        noise = np.random.default_rng(seed).normal(0, 0.05, tokens.shape)
        told = prompts.numpy().astype(np.int32)
        made.append(groups_of(model, shape, told, tokens, noise=noise, rewards=rewards))
    return made


def step_lines(
    model_dir: Path, batches: Sequence[Sequence[RolloutGroup]], shape: Shape, *, ranks: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Return a line for each step on each number of ranks."""
    sizes = ModelShape.of_config(json.loads((model_dir / "config.json").read_text()), name=shape.name)
    for count in ranks:
        for name in STEPS:
            if name.endswith("tp") and (count == 1 or sizes.heads % count or sizes.kv_heads % count):
                continue
            told = _on_ranks(_time_steps, count, name, str(model_dir), batches[:1], shape)
            tokens = _padded_tokens(shape) // told.pop("shares")
            tp, dp_shard = (count, 1) if name.endswith("tp") else (1, count)
            layout = RankLayout(dp_shard=dp_shard, tp=tp, micro_batch_tokens=tokens)
            planned = sum(rank_memory(sizes, layout, compute_bytes=4).values())
            yield {"kind": shape.name, "step": name, "ranks": count, **told, "planned_bytes": round(planned)}
    if "trl" in (makers := step_makers()) and shape in (SHAPE, SMALL, QUICK):
        step, took = makers["trl"](shape, list(batches[0])), []
        for _ in range(shape.rounds + 1):
            started_s = time.perf_counter()
            step()
            took.append(time.perf_counter() - started_s)
        yield {"kind": shape.name, "step": "trl", "ranks": 1, "seconds": statistics.median(took[1:])}


def life_lines(
    model_dir: Path, batch: Sequence[RolloutGroup], shape: Shape, *, ranks: Sequence[int], scratch: Path
) -> Iterator[dict[str, Any]]:
    """Return a line for the life on each number of ranks."""
    for count in ranks:
        config = LearnerConfig(
            model_dir=model_dir,
            learning_rate=LIFE_RATE,
            dp_shard=count,
            threads=1,
            checkpoint_every_versions=EVERY_VERSIONS,
            rank_timeout_s=LIMIT.total_seconds(),
        )
        directory = scratch / f"life-{count}"
        directory.mkdir()
        yield {"kind": shape.name, "life": "dp_shard", "ranks": count, **life(config, batch, directory)}
        shutil.rmtree(directory)


def curve_lines(
    model_dir: Path, batches: Sequence[Sequence[RolloutGroup]], shape: Shape, *, ranks: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Return the losses of each number of ranks on the same batches."""
    first: list[float] = []
    for count in ranks:
        losses = _on_ranks(_losses, count, str(model_dir), batches)["losses"]
        first = first or losses
        apart = max(abs(one - other) for one, other in zip(losses, first, strict=True))
        spread = max(first) - min(first)
        line = {"kind": shape.name, "curve": "dp_shard", "ranks": count, "losses": losses}
        yield line | {"apart": apart, "apart_over_spread": apart / spread if spread else 0.0}


def _on_ranks(work: Callable[..., dict[str, Any]], ranks: int, *arguments: Any) -> dict[str, Any]:
    """Run ``work`` on as many ranks; return what the first one told."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        told = Path(directory) / "figures"
        torch.multiprocessing.spawn(  # type: ignore[no-untyped-call, attr-defined]
            _rank, args=(ranks, port, work, str(told), arguments), nprocs=ranks
        )
        figures: dict[str, Any] = json.loads(told.read_text())
    return figures


def _rank(
    rank: int, ranks: int, port: int, work: Callable[..., Any], told: str, arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=LIMIT)
    figures = work(*arguments)
    if rank == 0:
        Path(told).write_text(json.dumps(figures))
    dist.destroy_process_group()


def _time_steps(
    name: str, model_dir: str, batches: Sequence[Sequence[RolloutGroup]], shape: Shape
) -> dict[str, Any]:
    ranks, before = dist.get_world_size(), resident_bytes()
    step: PlainSharded | OursSharded
    if name.startswith("plain"):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=False)
        step = PlainSharded(model, padded_ids(list(batches[0])), prompt_tokens=shape.prompt_tokens)
        del model
    else:
        sizes = MeshSizes(tp=ranks) if name.endswith("tp") else MeshSizes(dp_shard=ranks)
        group = {"ranks": RankGroup(sizes, device_type="cpu")} if ranks > 1 else {}
        step = OursSharded(Path(model_dir), batches, 1e-6, **group)
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
    told = {"seconds": round(seconds, 5), "peak_bytes": int(peak_bytes), "held_share": round(held, 4)}
    return told | {"shares": 1 if name.endswith("tp") else ranks}


def _losses(model_dir: str, batches: Sequence[Sequence[RolloutGroup]]) -> dict[str, Any]:
    ranks = dist.get_world_size()
    group = {"ranks": RankGroup(MeshSizes(dp_shard=ranks), device_type="cpu")} if ranks > 1 else {}
    step = OursSharded(Path(model_dir), batches, CURVE_RATE, **group)
    return {"losses": [step() for _ in batches]}


def _padded_tokens(shape: Shape) -> int:
    return shape.rows * (shape.prompt_tokens + shape.completion_tokens - 1)


def main(arguments: Sequence[str]) -> None:
    """Print the lines, and write the report unless in quick mode."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.learner_ranks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a small model, no report")
    parser.add_argument("--small", action="store_true", help="27 million parameters, two rounds, no report")
    parser.add_argument("--model", type=Path, help="a model directory; default: a Qwen3 with random weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="default: %(default)s")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="default: all")
    parser.add_argument("--curve", type=int, default=10, help="batches of the curve; default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the report")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shape = QUICK if options.quick else SMALL if options.small else SHAPE
    with tempfile.TemporaryDirectory() as directory:
        model_dir = options.model or Path(directory) / "model"
        if options.model is None:
            make_model(shape).save_pretrained(model_dir)
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, trust_remote_code=False
        ).train(False)
        if options.model is not None:
            text = model.config.get_text_config()
            shape = Shape(
                options.model.resolve().name,
                text.vocab_size,
                text.hidden_size,
                text.num_hidden_layers,
                2,
                8,
                16,
                64,
                rounds=5,
            )
        count = options.curve if "curve" in options.only else 1
        batches = batches_of(model, shape, count=count)
        del model
        lines: list[dict[str, Any]] = []
        makers = {
            "steps": lambda: step_lines(model_dir, batches, shape, ranks=options.ranks),
            "life": lambda: life_lines(
                model_dir, batches[0], shape, ranks=options.ranks, scratch=Path(directory)
            ),
            "curve": lambda: curve_lines(model_dir, batches, shape, ranks=options.ranks),
        }
        for part in options.only:
            for line in makers[part]():
                lines.append(line)
                print(json.dumps(line), flush=True)
    if not (options.quick or options.small):
        keep(lines, options.results)


def keep(lines: Sequence[dict[str, Any]], directory: Path) -> None:
    """Add the lines to those of other models and parts, in place of older ones, and write the report anew."""
    path = directory / RANKS_FILE
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def what(line: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(line.get(key) for key in ("kind", "step", "life", "curve", "ranks"))

    new = {what(line) for line in lines}
    kept = [line for line in old if what(line) not in new] + list(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    steps = directory / "learner.jsonl"
    write_report([json.loads(line) for line in steps.read_text().splitlines()], directory)


if __name__ == "__main__":
    main(sys.argv[1:])
