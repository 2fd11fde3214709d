"""A run's coordinator, for tests that know it by its rpcs alone: whatever is inside may change."""

from collections.abc import AsyncIterator

import pytest

from support.hub import RunningHub, running_hub
from support.identity import MadeRun
from support.made_run import made, made_once

__all__ = ["made", "made_once"]


@pytest.fixture
async def hub(made: MadeRun) -> AsyncIterator[RunningHub]:
    async with running_hub(made) as hub:
        yield hub
