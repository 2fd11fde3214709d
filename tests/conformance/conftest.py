"""Tests of one engine are collected where it is installed."""

from sampler.engines.engine_registry import has_vllm

collect_ignore = [] if has_vllm("cpu") else ["test_vllm_engine.py"]
