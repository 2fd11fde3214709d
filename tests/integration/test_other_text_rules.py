"""Peers whose tokenizer.json is the run's, and whose other files would have them read texts otherwise."""

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from node.exit_code import ExitCode
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.sampler import learning, sampling, verifying
from support.waiting import eventually, until

CHANGES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "tokenizer_config": (
        "tokenizer_config.json",
        {"eos_token": "="},
        'eos_token is "=" (the run has "<end>")',
    ),
    "generation_config": (
        "generation_config.json",
        {"eos_token_id": [1, 12]},
        "end tokens of generation_config.json and config.json is [1,12] (the run has [1])",
    ),
}
"""File -> what is changed in it, and how it is told."""


@pytest.fixture(params=CHANGES)
def changed(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> tuple[Path, str]:
    """Return a copy of the run's model directory with one file changed, and how the difference is told."""
    name, change, told = CHANGES[request.param]
    directory = Path(shutil.copytree(model_dir, tmp_path / "changed"))
    settings = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(settings | change))
    return directory, told


def errors(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(str(record.__dict__["error"]) for record in caplog.records if "error" in record.__dict__)


async def nobody_is_accused(hub: RunningHub, learner: HandPeer) -> None:
    assert hub.metric("heterorl_coordinator_proven_liars_total") == 0
    assert hub.metric("heterorl_coordinator_thrown_out_groups_total") == 0
    assert "quarantined" not in {peer.standing for peer in (await learner.status()).peers}


async def has_delivered(hub: RunningHub, learner: HandPeer, groups: int) -> None:
    async def spooled() -> bool:
        return dict((await learner.status()).slots)["spooled"] >= groups

    await eventually(spooled)


async def test_a_verifier_that_came_before_the_learner_is_sent_no_group_if_it_reads_texts_otherwise(
    made: MadeRun,
    base: TorchEngine,
    model_dir: Path,
    changed: tuple[Path, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, told = changed
    async with (
        running_hub(made) as hub,
        verifying(made, hub.address, directory) as verifier,
    ):
        await until(lambda: hub.metric("heterorl_coordinator_verifiers") == 1)
        async with learning(hub, base, model_dir) as learner, sampling(made, hub.address, model_dir):
            await learner.drain(credits=1000)
            await until(lambda: told in errors(caplog))
            assert (
                await verifier.ending is ExitCode.COULD_NOT_START
            )  # by itself: a drain would win over its error
            assert verifier.value("checks_total", outcome="agreed") == 0
            assert verifier.value("checks_total", outcome="disagreed") == 0
            await has_delivered(hub, learner, 3)
            await nobody_is_accused(hub, learner)


async def test_a_sampler_that_reads_texts_otherwise_is_refused_by_what_differs(
    made: MadeRun,
    base: TorchEngine,
    model_dir: Path,
    changed: tuple[Path, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, told = changed
    async with running_hub(made) as hub, sampling(made, hub.address, directory) as sampler:
        await until(lambda: bool(hub.hub.peers.members))
        async with learning(hub, base, model_dir) as learner:
            await learner.drain(credits=8)
            assert await asyncio.wait_for(sampler.ending, timeout=20) is ExitCode.COULD_NOT_START
            assert sum((await learner.status()).slots.values()) == 0
    assert told in errors(caplog)
