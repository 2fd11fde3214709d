"""Peaks of memory for ``bench.learner``: each case in a process of its own, as a peak leaves its traces.

A peak is of resident memory during one run above what was resident before it (Linux only). A step is
taken once before, which makes what stays: optimizer state, buffers of libraries.
"""

from concurrent.futures import ProcessPoolExecutor

import torch

from bench.forked_context import forked_context
from bench.learner.steps import Shape, make_groups, step_makers
from bench.shared.measure import peak, return_freed_memory


def step_peak(shape: Shape, name: str, *, threads: int) -> int | None:
    """Return the peak of one of the steps of ``step_makers``, in bytes."""
    # Where there is no trl, bench.learner.trl_steps is left out.
    context = forked_context("bench.learner.report", __name__, "bench.learner.trl_steps")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_peak_of_step, shape, name, threads).result()


def _peak_of_step(shape: Shape, name: str, threads: int) -> int | None:
    torch.set_num_threads(threads)
    return_freed_memory()
    step = step_makers(shape)[name](shape, make_groups(shape))
    step()
    return peak(step)[0]
