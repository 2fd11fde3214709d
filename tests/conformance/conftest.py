"""Tests of one engine are collected where it is installed; a whole sampler is of a run of its own."""

from sampler.engines.engine_registry import has_vllm
from support.tiny_run import made, same_threads_after
from support.warm_processes import warm_engines

__all__ = ["made", "same_threads_after", "warm_engines"]

collect_ignore_glob = [] if has_vllm("cpu") else ["test_remote_engine.py", "test_vllm_*.py"]
