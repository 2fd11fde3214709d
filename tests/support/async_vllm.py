"""Async scheduling in vLLM's CPU build, which switches it off: there is nothing that could overlap.

What it does to requests, versions and outputs is the same as on a GPU, step for step; only CUDA's streams and
events, which order copies there, are left out.
"""

import contextlib
from typing import Any

import torch


class _Nothing:
    """A stream or an event of a device that has ended whatever it was given."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, *_: object) -> None: ...


def allow_async_scheduling() -> None:
    """Let engines of this process schedule asynchronously if they are told to, from now on."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        is_async = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = _Nothing
    cuda.current_stream = _Nothing
    cuda.stream = contextlib.nullcontext
