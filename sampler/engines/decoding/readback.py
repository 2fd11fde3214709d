"""Drawn tokens on their way from the device to the CPU.

    step     1 --------- 2 --------- 3 ---------          on the device
    copy               1 ->        2 ->                   into pinned memory
    read                     1           2                the CPU, while the device computes 2 and 3

On a CUDA device the results of a step are read while the next one is computed. So the CPU never waits for the
step it has just launched, and the device never waits for the CPU. On a CPU they are read at once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sampler.engines.decoding.rows import Row


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What one step drew, on the device."""

    token_ids: Tensor
    """[rows], int64."""
    logprob: Tensor
    """[rows], float32, nats."""
    kept_mass: Tensor
    """[rows], float32."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadDrawn:
    """What one step drew for ``rows``, on the CPU."""

    rows: Sequence[Row]
    version: int
    token_ids: list[int]
    logprobs: list[float]
    kept_masses: list[float]


class Readback:
    """Steps whose results are not read yet, oldest first; at most ``depth`` and the newest."""

    def __init__(self, *, depth: int) -> None:
        self._depth = depth
        self._steps: deque[tuple[Sequence[Row], int, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, drawn: Drawn, rows: Sequence[Row], *, version: int) -> None:
        """Start to copy the results of a step."""
        # As integers, so that nothing on the way takes a token for a denormal number.
        columns = [drawn.token_ids.int(), drawn.logprob.view(torch.int32), drawn.kept_mass.view(torch.int32)]
        packed = torch.stack(columns)
        copied = None
        if packed.is_cuda:
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            packed = host.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._steps.append((rows, version, packed, copied))

    def take(self, *, all_of_them: bool = False) -> list[ReadDrawn]:
        """Return the results that are due, waiting for their copies."""
        return [self._next() for _ in range(len(self._steps) - (0 if all_of_them else self._depth))]

    def _next(self) -> ReadDrawn:
        rows, version, packed, copied = self._steps.popleft()
        if copied is not None:
            copied.synchronize()
        token_ids, logprobs, kept_masses = packed.unbind()
        return ReadDrawn(
            rows,
            version,
            token_ids.tolist(),
            logprobs.view(torch.float32).tolist(),
            kept_masses.view(torch.float32).tolist(),
        )
