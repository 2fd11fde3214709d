"""The run of the tiny model that most of these tests start from, and its coordinator."""

from collections.abc import AsyncIterator

import pytest

from support.hub import RunningHub, running_hub
from support.identity import MadeRun
from support.made_run import made, made_once
from support.policy_sync import state_dir
from support.tiny_run import base, model_dir, same_threads_after
from support.training_loop import scripted, start

__all__ = ["base", "made", "made_once", "model_dir", "same_threads_after", "scripted", "start", "state_dir"]


@pytest.fixture
async def hub(made: MadeRun) -> AsyncIterator[RunningHub]:
    async with running_hub(made) as hub:
        yield hub
