"""Tests of one engine are collected where it is installed; a whole sampler is of a run of its own."""

import os

import pytest

from sampler.engines.engine_registry import has_vllm
from support.made_run import made, made_once
from support.tiny_run import same_threads_after

__all__ = ["made", "made_once", "same_threads_after"]

collect_ignore_glob = [] if has_vllm("cpu") else ["test_remote_engine.py", "test_vllm_*.py"]


@pytest.fixture(scope="module", autouse=True)
def warm_where_vllm_is_not_installed(request: pytest.FixtureRequest) -> None:
    """Start engines in processes of their own warm, unless they use a GPU, which a forked process cannot.

    vLLM sets the environment before it is imported.
    """
    if not has_vllm("cpu") and not os.environ["CUDA_VISIBLE_DEVICES"]:
        request.getfixturevalue("warm_engines")
