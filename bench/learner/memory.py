"""Peaks of memory for ``bench.learner``: each case in a process of its own, as a peak leaves its traces.

A peak is of resident memory during one run above what was resident before it (Linux only). A step is
taken once before, which makes what stays: optimizer state, buffers of libraries.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from bench.forked_context import forked_context
from bench.learner.steps import Shape, make_groups, step_makers
from bench.measure import peak, return_freed_memory
from learner.model.token_logprob import CHUNK_LOGITS, token_logprob

LOGPROBS: Final = ("in chunks", "all at once")
LOGPROB_TOKENS: Final = 4096
LOGPROB_WIDTH: Final = 64

T = TypeVar("T")


def step_peak(shape: Shape, name: str, *, threads: int) -> int | None:
    """Return the peak of one of the steps of ``step_makers``, in bytes."""
    # Where there is no trl, bench.learner.trl_steps is left out.
    imports = ("bench.learner.report", __name__, "bench.learner.trl_steps")
    return _alone(_peak_of_step, shape, name, threads, imports=imports)


def logprob_peak(vocabulary: int, name: str, *, threads: int) -> dict[str, Any]:
    """Return the line of one of LOGPROBS: logprobs and their gradients, forward and backward."""
    line = {"logprobs": name, "vocabulary": vocabulary, "tokens": LOGPROB_TOKENS}
    needed = 3 * LOGPROB_TOKENS * vocabulary * 4
    if name == "all at once" and needed > _available_bytes() // 2:
        return {**line, "skipped": f"needs some {needed >> 30} GiB"}
    peak_bytes, cpu_seconds = _alone(_peak_of_logprob, vocabulary, name, threads, imports=(__name__,))
    gradient_bytes = 4 * LOGPROB_WIDTH * (LOGPROB_TOKENS + vocabulary)
    return {
        **line,
        "cpu_seconds": round(cpu_seconds, 3),
        "peak_bytes": peak_bytes,
        "gradient_bytes": gradient_bytes,
        "logits_bytes": None if peak_bytes is None else peak_bytes - gradient_bytes,
        "chunk_bytes": 4 * min(CHUNK_LOGITS, LOGPROB_TOKENS * vocabulary),
    }


def _alone(run: Callable[..., T], *arguments: object, imports: Sequence[str]) -> T:
    with ProcessPoolExecutor(1, forked_context(*imports)) as pool:
        return pool.submit(run, *arguments).result()


def _peak_of_step(shape: Shape, name: str, threads: int) -> int | None:
    torch.set_num_threads(threads)
    return_freed_memory()
    step = step_makers()[name](shape, make_groups(shape))
    step()
    return peak(step)[0]


def _peak_of_logprob(vocabulary: int, name: str, threads: int) -> tuple[int | None, float]:
    torch.set_num_threads(threads)
    return_freed_memory()
    hidden = torch.randn(LOGPROB_TOKENS, LOGPROB_WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, LOGPROB_WIDTH, requires_grad=True)
    target_ids = torch.randint(vocabulary, (LOGPROB_TOKENS,))
    ones = torch.ones(LOGPROB_TOKENS)

    def run() -> None:
        if name == "in chunks":
            logprob = token_logprob(hidden, weight, None, target_ids=target_ids, temperature=ones)
        else:
            logits = torch.log_softmax(hidden @ weight.T, dim=-1)
            logprob = logits.gather(-1, target_ids[:, None])
        logprob.sum().backward()  # type: ignore[no-untyped-call]

    started = time.process_time()
    peak_bytes, _ = peak(run)
    return peak_bytes, time.process_time() - started


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])
