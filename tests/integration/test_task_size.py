"""How many prompts a run has is the task's to say: real coordinator, real sampler, real task."""

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from node.exit_code import ExitCode
from node.rpc.channel import REASON_KEY
from node.tokenizer import tokenizer_digest
from sampler.engines.torch_engine import TorchEngine
from support.hub import HandPeer, running_hub
from support.identity import MadeRun
from support.sampler import learning, sampling
from support.waiting import until

FINE = {"t": "support.bad_prompts:Fine"}
"""A custom task of twenty prompts."""


async def refusal(peer: HandPeer, prompts: int, **model: bytes) -> tuple[str, str]:
    """Join as somebody whose task has so many prompts, and give reason and message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await peer.join(prompts=prompts, **model)
    reason = dict(error.value.trailing_metadata() or ())[REASON_KEY]
    return str(reason), error.value.details() or ""


async def test_a_sampler_whose_task_is_smaller_than_configured_is_refused_with_both_numbers_and_ends(
    made: MadeRun, base: TorchEngine, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_hub(made, task="addition", prompts=200) as hub,
        learning(hub, base, model_dir),
        sampling(made, hub.address, model_dir) as sampler,
    ):
        assert await asyncio.wait_for(sampler.ending, timeout=15) is ExitCode.COULD_NOT_START
    errors = [str(record.__dict__["error"]) for record in caplog.records if "error" in record.__dict__]
    assert errors == [
        "coordinator.prompts = 200, and task 'addition' of sampler sampler-1 has 100 prompts; "
        "set coordinator.prompts = 100 or leave it out, or give this sampler the others' task"
    ]


async def test_without_a_number_the_first_sampler_says_and_the_ledger_remembers(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    async with (
        running_hub(made, task="t", prompts=None) as hub,
        learning(hub, base, model_dir) as learner,
    ):
        before = await learner.status()
        assert (before.prompts, before.capacity_bound) == (0, "task")
        async with sampling(made, hub.address, model_dir, custom_tasks=FINE) as sampler:
            await until(lambda: sampler.value("groups_total", verdict="spooled") >= 1)
            status = await learner.status()
            assert status.prompts == 20
            assert [peer.joins for peer in status.peers if peer.node_id == made.sampler.node_id] == [1]
    async with running_hub(made, task="t", prompts=None) as again, again.peer(made.sampler) as peer:
        assert (await peer.status()).prompts == 20
        model = {"layout_digest": base.layout.digest, "tokenizer_digest": tokenizer_digest(model_dir)}
        reason, message = await refusal(peer, 19, **model)
        assert reason == "task_mismatch"
        assert "has 19 prompts, this run has 20 since sampler sampler-1 joined" in message
        assert "sampler.custom_tasks" in message


async def test_a_task_of_ours_says_its_number_itself_and_an_absurd_word_of_a_sampler_is_refused(
    made: MadeRun,
) -> None:
    async with running_hub(made, task="addition", prompts=None) as hub, hub.peer(made.sampler) as peer:
        assert (await peer.status()).prompts == 100
        assert (await refusal(peer, 1 << 40))[0] == "task_mismatch"


async def test_the_number_may_be_changed_by_who_runs_the_coordinator(made: MadeRun) -> None:
    async with running_hub(made, task="t", prompts=None) as hub, hub.peer(made.sampler) as sampler:
        await sampler.join(prompts=100)
    async with running_hub(made, task="t", prompts=150) as hub, hub.peer(made.sampler) as sampler:
        assert (await refusal(sampler, 100))[0] == "task_mismatch"
        await sampler.join(prompts=150)
        assert (await sampler.status()).prompts == 150
    async with running_hub(made, task="t", prompts=None) as hub, hub.peer(made.sampler) as sampler:
        assert (await sampler.status()).prompts == 150


async def test_a_number_of_prompts_that_no_task_has_is_refused(made: MadeRun) -> None:
    async with running_hub(made, prompts=None) as hub, hub.peer(made.sampler) as sampler:
        assert (await refusal(sampler, -1))[0] == "malformed"
        assert (await refusal(sampler, 1 << 50))[0] == "malformed"
