"""How many prompts a run has is the operator's to say: real coordinator, real sampler, real task."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from node.errors import ConfigError, Reason
from node.exit_code import ExitCode
from sampler.engines.torch.torch_engine import TorchEngine
from support.by_rpc import refusal_of
from support.hub import HandPeer, running_hub
from support.identity import MadeRun
from support.sampler import learning, sampling


async def refusal(peer: HandPeer, prompts: int) -> Reason:
    """Join as somebody whose task has so many prompts, and return the reason of the refusal."""
    return (await refusal_of(peer.join(prompts=prompts))).reason


async def test_a_sampler_whose_task_has_another_number_is_refused_with_both_numbers_and_ends(
    made: MadeRun, base: TorchEngine, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_hub(made, task="addition", prompts=200) as hub,
        learning(hub, base, model_dir),
        sampling(made, hub.address, model_dir) as sampler,
    ):
        assert await asyncio.wait_for(sampler.ending, timeout=15) is ExitCode.COULD_NOT_START
    (error,) = [str(record.__dict__["error"]) for record in caplog.records if "error" in record.__dict__]
    for part in ("sampler-1", "'addition'", " 100 ", " 200;", "coordinator.prompts = 100"):
        assert part in error


async def test_a_task_that_counts_its_own_prompts_needs_their_number_of_the_configuration(
    made: MadeRun,
) -> None:
    with pytest.raises(ConfigError) as error:
        async with running_hub(made, task="t", prompts=None):
            raise AssertionError
    assert error.value.key == "coordinator.prompts"


async def test_no_number_of_samplers_says_how_many_prompts_there_are(made: MadeRun) -> None:
    names = [made.sampler, made.other_sampler, made.issue(made.sampler.role, "third")]
    async with running_hub(made, task="t", prompts=20) as hub, AsyncExitStack() as stack:
        for name in names:
            liar = await stack.enter_async_context(hub.peer(name))
            assert await refusal(liar, 1 << 40) is Reason.TASK_MISMATCH
        await liar.join(prompts=20)
        status = await liar.status()
        assert status.prompts == 20
        assert [peer.state for peer in status.peers] == ["joined"]


async def test_the_number_may_be_changed_by_who_runs_the_coordinator(made: MadeRun) -> None:
    for runs, before in ((100, 20), (150, 100)):
        async with running_hub(made, task="t", prompts=runs) as hub, hub.peer(made.sampler) as sampler:
            assert await refusal(sampler, before) is Reason.TASK_MISMATCH
            await sampler.join(prompts=runs)
            assert (await sampler.status()).prompts == runs


async def test_a_number_of_prompts_that_no_task_has_is_refused(made: MadeRun) -> None:
    async with running_hub(made, prompts=None) as hub, hub.peer(made.sampler) as sampler:
        assert await refusal(sampler, -1) is Reason.MALFORMED
        assert await refusal(sampler, 1 << 50) is Reason.MALFORMED
