"""One pass from float32 masters to coded frames, and what training pays for it. One JSON line per figure.

python -m bench.publish                       two sizes of a model of random weights, one step apart
python -m bench.publish --parameters 1e9      another size; may be given several times

what       fused: as learner.publishing.publisher does, frame by frame; cast_then_encode: the whole version is
           rounded first and coded then; cast: rounding alone; encode: coding alone
gb_s       bytes of the bf16 version per second, by the clock; best of the repetitions
peak_extra_bytes    resident memory above masters, base and the version being made; Linux only

what       training_thread: how long a step is held up by publishing the version before it, with
           forward and backward passes that take ``step_s``; copies_s is what it costs to copy the
           version out in the training thread instead
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from bench.measure import CORES, best, peak
from bench.whole_versions import encode_version
from learner.metrics import Instruments
from learner.publishing.further_artifacts import FurtherArtifacts
from learner.publishing.publisher import Publisher
from learner.publishing.signer import Signer
from learner.training.master_access import MasterAccess
from learner.training.master_words import MasterWords
from node.clock import SystemClock
from node.identity.signatures import SigningKey
from node.rollout import SamplingParameters
from node.run import RunSettings
from node.telemetry.metrics import NodeMetrics
from node.weights.assembly.encode import code_frames
from node.weights.assembly.held import HeldPolicy
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.store.artifact_store import ArtifactStore

_WIDTH: Final = 2048
_STEP: Final = 3e-7
"""Of every master, up or down. With weights of 0.02 one bf16 word in a hundred changes."""
_STEPS_S: Final = (0.0, 1.0)
_VERSIONS: Final = 8


class Model:
    """Masters one step after the version that was published, and room for the next."""

    def __init__(self, parameters: int) -> None:
        rows = max(1, parameters // _WIDTH)
        shapes = {f"layers.{n:04}.weight": (min(8 * _WIDTH, rows - at), _WIDTH) for n, at in _cuts(rows)}
        self.layout = Layout.of(TensorSpec(name, shape) for name, shape in shapes.items())
        random = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.empty(shape).normal_(0, 0.02, generator=random) for name, shape in shapes.items()
        }
        self.masters = MasterWords(self.tensors, self.layout)
        self.made: Words = np.zeros(self.layout.words, np.uint16)
        words = np.empty(self.layout.words, np.uint16)
        self.cast(words)
        self.base = HeldPolicy.of(0, words, layout=self.layout)
        self.step()

    def step(self) -> None:
        """Move every master a little, as Adam does."""
        for tensor in self.tensors.values():
            for rows in torch.split(tensor, _WIDTH):
                rows.add_(torch.randint_like(rows, 2), alpha=2 * _STEP).sub_(_STEP)

    def cast(self, words: Words) -> None:
        """Round everything."""
        for number, frame in enumerate(self.layout.frames):
            self.masters.read(number, words[frame.slice])

    def read(self, frame: int) -> Words:
        """Round one frame."""
        words = self.made[self.layout.frames[frame].slice]
        self.masters.read(frame, words)
        return words

    def fused(self, put: Callable[[bytes], object], pool: Executor | None) -> None:
        """Do what the publisher does."""
        code_frames(
            range(len(self.layout.frames)),
            new=self.read,
            base=self.base.frame_words(self.layout),
            layout=self.layout,
            put=put,
            executor=pool,
            under_way=2 * CORES,
        )

    def encode(self, pool: Executor | None) -> None:
        """Code what was rounded before."""
        encode_version(
            self.made,
            version=1,
            base=self.base,
            layout=self.layout,
            run_id="bench",
            learner_epoch=1,
            published_at_s=0.0,
            executor=pool,
        )

    def cast_then_encode(self, pool: Executor | None) -> None:
        """Do it one after the other."""
        self.cast(self.made)
        self.encode(pool)


def _cuts(rows: int) -> Iterator[tuple[int, int]]:
    return enumerate(range(0, rows, 8 * _WIDTH))


def compare(model: Model, *, repetitions: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of the passes."""
    with (scratch / "payloads").open("wb") as file, ThreadPoolExecutor(CORES) as pool:
        passes: dict[str, Callable[[Executor | None], None]] = {
            "fused": lambda threads: model.fused(file.write, threads),
            "cast_then_encode": model.cast_then_encode,
            "cast": lambda threads: model.cast(model.made),
            "encode": model.encode,
        }
        model.cast(model.made)
        changed = float(np.mean(model.made != model.base.words))
        for name, run in passes.items():
            for threads in (None, pool) if name != "cast" else (None,):
                once = partial(run, threads)
                # Only what runs first takes the memory that threads keep.
                extra = peak(once)[0] if name == "fused" else None
                clock = time.thread_time if threads is None else time.perf_counter
                took_s = best(once, clock, repetitions)
                line = {
                    "what": name,
                    "threads": 1 if threads is None else CORES,
                    "parameters": model.layout.words,
                    "density": round(changed, 5),
                    "gb_s": round(2 * model.layout.words / took_s / 1e9, 3),
                }
                yield line if extra is None else {**line, "peak_extra_bytes": extra}


async def hold_up(model: Model, *, step_s: float, scratch: Path) -> dict[str, Any]:
    """Run the publisher beside a training thread that only pretends to compute."""
    key, clock = SigningKey.generate(), SystemClock()
    store = ArtifactStore(scratch, public_key=key.public_key, run_id="bench", retained_keyframes=1)
    access = MasterAccess(version=0, monotonic=clock.monotonic)
    signer = Signer(key, "bench", 1)
    registry = CollectorRegistry()
    node_metrics = NodeMetrics(registry, roles=["learner"], clock=clock)
    publisher = Publisher(
        access,
        model.masters,
        store,
        signer=signer,
        threads=CORES,
        further=FurtherArtifacts(
            store,
            signer,
            layout=model.layout,
            words0=model.base.words,
            keyframe_every_versions=_VERSIONS + 1,
            public_delta_every_versions=_VERSIONS + 1,
            longest_lag_versions=lambda: 0,
        ),
        run_settings=_run_settings,
        instruments=Instruments.of(registry, node_metrics, clock=clock),
    )
    ready, stopping = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(publisher.run(ready=ready.set, stopping=stopping))
    await ready.wait()
    waited = []
    for version in range(1, _VERSIONS + 1):
        await asyncio.sleep(step_s)
        waited.append(await asyncio.to_thread(access.begin_writing))
        await asyncio.to_thread(model.step)
        access.hold(version)
    stopping.set()
    await task
    announcement = store.announcement()
    started = time.perf_counter()
    model.cast(model.made)
    return {
        "what": "training_thread",
        "parameters": model.layout.words,
        "step_s": step_s,
        "waits_s_mean": round(float(np.mean(waited[1:])), 4),
        "waits_s_max": round(max(waited), 4),
        "copies_s": round(time.perf_counter() - started, 4),
        "versions": _VERSIONS,
        "published": 0 if announcement is None else len(announcement.artifacts),
    }


async def _run_settings() -> RunSettings:
    return RunSettings("none", 1, 1, 1, 1.0, None, SamplingParameters(1.0, 1.0, 0, 1))


def main(arguments: Sequence[str]) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, action="append", help="of the model; several times")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    sizes = options.parameters or [32e6, 128e6]
    if len(sizes) > 1:
        # Each in a process of its own: memory that one size has taken would hide what the next needs.
        for size in sizes:
            repeated = ["--parameters", str(size), "--repetitions", str(options.repetitions)]
            subprocess.run([sys.executable, "-m", "bench.publish", *repeated], check=True)
        return
    torch.set_num_threads(CORES)
    model = Model(int(sizes[0]))
    with tempfile.TemporaryDirectory() as scratch:
        for line in compare(model, repetitions=options.repetitions, scratch=Path(scratch)):
            print(json.dumps(line), flush=True)
    for step_s in _STEPS_S:
        with tempfile.TemporaryDirectory() as scratch:
            line = asyncio.run(hold_up(model, step_s=step_s, scratch=Path(scratch)))
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
