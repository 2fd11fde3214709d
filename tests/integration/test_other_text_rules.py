"""Peers whose tokenizer.json is the run's, and whose other files would have them read texts otherwise."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from node.exit_code import ExitCode
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import running_hub
from support.identity import MadeRun
from support.sampler import learning, sampling, verifying
from support.waiting import eventually, until

CHANGES = {
    "tokenizer_config.json": {"eos_token": "="},
    "generation_config.json": {"eos_token_id": [1, 12]},
}
TOLD = (
    'eos_token is "=" (the run has "<end>")',
    "end tokens of generation_config.json and config.json is [1,12] (the run has [1])",
)


@pytest.fixture
def changed(model_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of the run's model directory with other settings."""
    directory = Path(shutil.copytree(model_dir, tmp_path / "changed"))
    for name, change in CHANGES.items():
        settings = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(settings | change))
    return directory


def are_told(caplog: pytest.LogCaptureFixture) -> bool:
    errors = " ".join(str(record.__dict__.get("error", "")) for record in caplog.records)
    return all(told in errors for told in TOLD)


async def test_a_verifier_that_came_before_the_learner_is_sent_no_group_if_it_reads_texts_otherwise(
    made: MadeRun, base: TorchEngine, model_dir: Path, changed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def has_delivered() -> bool:
        return dict((await learner.status()).slots)["spooled"] >= 3

    async with running_hub(made) as hub, verifying(made, hub.address, changed) as verifier:
        await until(lambda: hub.metric("heterorl_coordinator_verifiers") == 1)
        async with learning(hub, base, model_dir) as learner, sampling(made, hub.address, model_dir):
            await learner.drain(credits=1000)
            await until(lambda: are_told(caplog))
            # By itself: a drain would win over its error.
            assert await verifier.ending is ExitCode.COULD_NOT_START
            assert verifier.value("checks_total", outcome="agreed") == 0
            assert verifier.value("checks_total", outcome="disagreed") == 0
            await eventually(has_delivered)
            assert hub.metric("heterorl_coordinator_proven_liars_total") == 0
            assert hub.metric("heterorl_coordinator_thrown_out_groups_total") == 0
            assert "quarantined" not in {peer.standing for peer in (await learner.status()).peers}


async def test_a_sampler_that_reads_texts_otherwise_is_refused_by_what_differs(
    made: MadeRun, base: TorchEngine, model_dir: Path, changed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_hub(made) as hub, sampling(made, hub.address, changed) as sampler:
        await until(lambda: bool(hub.hub.peers.members))
        async with learning(hub, base, model_dir) as learner:
            await learner.drain(credits=8)
            assert await asyncio.wait_for(sampler.ending, timeout=20) is ExitCode.COULD_NOT_START
            assert sum((await learner.status()).slots.values()) == 0
    assert are_told(caplog)
