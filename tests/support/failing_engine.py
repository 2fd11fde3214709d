"""The torch engine, made to fail as real ones do: an engine of one's own, named by its import path."""

import os
import sys
import time
from pathlib import Path

import torch

from sampler.engines.engine import EngineSettings, GenerationRequest
from sampler.engines.torch.torch_engine import TorchEngine


class FailingEngine(TorchEngine):
    """At every step, looks for a file that says how to fail: once, or for as long as it is there."""

    faults: Path

    def step(self) -> list[GenerationRequest]:
        finished = super().step()
        kind = self.faults.read_text() if self.faults.exists() else ""
        if kind == "out of memory":
            self.faults.unlink()
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        if kind == "broken":
            raise RuntimeError("an illegal memory access was encountered")
        while kind == "hang" and self.faults.exists():
            time.sleep(0.01)
        return finished


def print_and_exit(settings: EngineSettings) -> None:
    """Print what a terminal obeys and what would pass for an event, and end the process."""
    print('\x1b[2J\n{"event": 1}', file=sys.stderr, flush=True)
    os._exit(7)


def load(settings: EngineSettings) -> FailingEngine:
    engine = FailingEngine(
        settings.model_dir,
        device=settings.device,
        compute_dtype=torch.float32,
        threads=settings.threads,
        seed=settings.seed,
    )
    engine.faults = Path(str(settings.engine_options["faults"]))
    return engine
