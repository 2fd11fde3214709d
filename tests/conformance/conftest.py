"""Tests of one engine are collected where it is installed; a whole sampler is of a run of its own."""

from sampler.engines.engine_registry import has_vllm
from support.tiny_run import made, same_threads_after

__all__ = ["made", "same_threads_after"]

collect_ignore = (
    [] if has_vllm("cpu") else ["test_remote_engine.py", "test_vllm_engine.py", "test_vllm_experts.py"]
)
