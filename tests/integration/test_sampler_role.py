"""The sampler as the daemon runs it, with a real coordinator over mTLS and a learner driven by hand."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from heterorl.v1 import (
    common_pb2,
)
from node.exit_code import ExitCode
from node.values.groups.rollout import Finish, RolloutGroup
from node.values.groups.well_formed import check_group
from node.wire.rollouts import encoded_from_wire, group_from_wire
from sampler.engines.engine import EngineUse
from sampler.engines.text.stop_strings import text_before_stop
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.rollouts import leasing
from sampler.rollouts.concurrency import Concurrency
from support.hub import HandDrain, HandPeer, running_hub
from support.identity import MadeRun
from support.relay import running_relay
from support.sampler import learner_of, learning, sampled, sampling
from support.tiny_model import VOCABULARY_SIZE
from support.waiting import eventually, until

STOP = ["a", "7", "=3"]


async def next_group(drain: HandDrain) -> RolloutGroup:
    response = await drain.hear()
    assert response.WhichOneof("message") == "group", response
    return group_from_wire(encoded_from_wire(response.group))


async def slots(peer: HandPeer) -> dict[str, int]:
    return dict((await peer.status()).slots)


async def test_groups_arrive_graded_on_what_stands_before_a_stop_string_and_with_their_logprobs(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    seen: set[Finish] = set()
    settings = {"task": "length", "group_size": 8, "stop": STOP, "min_p": 0.01}
    sampler = {"custom_tasks": {"length": "support.length_task:Length"}}
    async with sampled(made, base, model_dir, sampler=sampler, **settings) as (_, learner, running):
        drain = await learner.drain(credits=40)
        while not seen >= {Finish.STOP, Finish.LENGTH}:
            group = await next_group(drain)
            check_group(group, vocabulary_size=VOCABULARY_SIZE)
            assert (group.task, group.run_id, len(group.completions)) == ("length", made.run_id, 8)
            assert (group.sampling.stop, group.sampling.min_p) == (tuple(STOP), 0.01)
            assert base.tokenizer.decode(group.prompt_token_ids) == f"{group.prompt_index}+1="
            for completion in group.completions:
                text = base.tokenizer.decode(completion.token_ids)
                before = text_before_stop(text, STOP)
                assert (text != before) == (completion.finish is Finish.STOP)
                assert completion.reward == len(before)
                assert completion.kept_mass is not None
                assert (completion.policy_version == 0).all()
                seen.add(completion.finish)
            started, finished = group.sampling_started_at_s, group.sampling_finished_at_s
            assert started <= finished <= group.graded_at_s
            await drain.judge(group.group_id, common_pb2.VERDICT_ACCEPTED)
        await until(lambda: running.value("groups_total", verdict="accepted") >= 1)
        assert running.value("tokens_total") > 0


async def test_a_published_version_is_fetched_while_sampling_and_sampled_from(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    async with sampled(made, base, model_dir) as (_, learner, sampler):
        drain = await learner.drain(credits=100)
        first = await next_group(drain)
        assert first.newest_version == 0
        await learner.publish(*learner_of(made, base).signed(1, None))
        await drain.step(1, first.group_id)
        await until(lambda: sampler.value("held_version") == 1)

        async def is_sampled_from() -> bool:
            response = await drain.hear()
            if response.WhichOneof("message") != "group":
                return False
            group = group_from_wire(encoded_from_wire(response.group))
            await drain.judge(group.group_id, common_pb2.VERDICT_STALE)
            return group.oldest_version == 1

        async def status_says_held() -> bool:
            peers = {peer.node_id: peer for peer in (await learner.status()).peers}
            return peers[made.sampler.node_id].held.number == 1

        await eventually(is_sampled_from)
        await eventually(status_says_held)
        assert sampler.value("swap_seconds_count") >= 2


@pytest.mark.parametrize("names_coordinator", [False, True])
async def test_behind_a_relay_weights_are_the_relays_copy_and_groups_reach_the_coordinator(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path, *, names_coordinator: bool
) -> None:
    encoded = learner_of(made, base).encode(1, None)
    async with (
        running_hub(made) as hub,
        learning(hub, base, model_dir) as learner,
        running_relay(made, tmp_path / "relay", coordinator=hub.address) as relay,
        # Its address is the coordinator's as well, for whoever writes that.
        sampling(
            made, relay.address if names_coordinator else None, model_dir, relays=[relay.address]
        ) as sampler,
    ):
        drain = await learner.drain(credits=100)
        first = await next_group(drain)
        assert first.sampler_id == made.sampler.node_id
        await learner.publish(*learner_of(made, base).signed(1, None))
        await drain.step(1, first.group_id)
        await until(lambda: sampler.value("held_version") == 1)
        size = encoded.manifest.size_bytes
        assert hub.metric("heterorl_node_transfer_bytes_total", kind="keyframe", direction="out") == size
        assert relay.registry.transferred("keyframe", "out") == size


async def test_a_sampler_outlives_its_hub_and_hands_in_what_it_finished_meanwhile(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    async with AsyncExitStack() as stack:
        async with running_hub(made) as first, learning(first, base, model_dir):
            listen = first.address
            sampler = await stack.enter_async_context(sampling(made, listen, model_dir))
            await until(lambda: sampler.value("groups_total", verdict="spooled") >= 1)
        handed_in = sampler.value("groups_total", verdict="spooled")
        second = await stack.enter_async_context(running_hub(made, listen=listen))
        learner = await stack.enter_async_context(learning(second, base, model_dir))
        drain = await learner.drain(credits=100)
        while sampler.value("groups_total", verdict="spooled") < handed_in + 2:
            group = await next_group(drain)
            await drain.judge(group.group_id, common_pb2.VERDICT_STALE)
        assert await sampler.drained() is ExitCode.DRAINED
        assert (await slots(learner)).get("leased", 0) == 0


async def test_stopping_gives_leases_back_and_hands_in_what_is_finished(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    async with sampled(made, base, model_dir, max_new_tokens=200, max_staleness_versions=50) as (
        _,
        learner,
        sampler,
    ):
        await until(lambda: sampler.value("running_leases") >= 3)
        assert await sampler.drained() is ExitCode.DRAINED
        assert (await slots(learner)).get("leased", 0) == 0
        assert sampler.value("outbox_groups") == 0
        peers = {peer.node_id: peer for peer in (await learner.status()).peers}
        assert peers[made.sampler.node_id].state == "left"


async def test_a_sampler_that_is_given_no_number_reads_how_full_its_engine_is(
    made: MadeRun, base: TorchEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[EngineUse] = []

    class Counted(Concurrency):
        def note(self, use: EngineUse, *, is_held_back: bool, group_s: float | None, now: float) -> bool:
            readings.append(use)
            self.groups = 5
            return True

    monkeypatch.setattr(leasing, "READING_S", 0.01)
    monkeypatch.setattr(leasing, "Concurrency", Counted)
    async with sampled(
        made,
        base,
        model_dir,
        sampler={"concurrency_groups": None},
        max_new_tokens=200,
        max_staleness_versions=50,
    ) as (_, _, sampler):
        await until(lambda: any(use.asked_share > 0 for use in readings))
        assert sampler.value("concurrency_groups") == 5
        assert await sampler.drained() is ExitCode.DRAINED


async def test_a_sampler_that_does_not_know_the_runs_task_says_so_and_ends(
    made: MadeRun, base: TorchEngine, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sampled(made, base, model_dir, task="unheard-of") as (_, _, sampler):
        assert await asyncio.wait_for(sampler.ending, timeout=20) is ExitCode.CONFIGURATION
    assert any("sampler.custom_tasks" in str(record.__dict__.get("error")) for record in caplog.records)
