"""A run with a few bad prompts goes on: real coordinator, real sampler, real graders, a learner by hand."""

import asyncio
from pathlib import Path

from node.values.groups.rollout import RolloutGroup
from node.wire.rollouts import encoded_from_wire, group_from_wire
from sampler.engines.torch.torch_engine import TorchEngine
from support.bad_prompts import is_bad
from support.clock import ManualClock
from support.hub import HandDrain, running_hub
from support.identity import MadeRun
from support.sampler import learning, sampling
from support.waiting import WITHIN_S, eventually

PROMPTS = 20
GROUPS = 24
"""More than an epoch, with two bad prompts."""


async def pass_time(clock: ManualClock) -> None:
    """Let an hour of the coordinator's go by in a minute; samplers keep their leases."""
    while True:
        await asyncio.sleep(0.05)
        clock.advance(3.0)


async def train(drain: HandDrain, clock: ManualClock, *, groups: int, version: int = 0) -> list[RolloutGroup]:
    """Train on each group by itself, from ``version`` on, until acknowledged; return the groups."""
    trained: list[RolloutGroup] = []
    acknowledged = version
    passing = asyncio.create_task(pass_time(clock))
    try:
        async with asyncio.timeout(WITHIN_S):
            while acknowledged < version + groups:
                response = await drain.hear()
                if response.WhichOneof("message") == "step_acknowledged":
                    acknowledged = response.step_acknowledged.version
                elif len(trained) < groups:
                    trained.append(group_from_wire(encoded_from_wire(response.group)))
                    await drain.step(version + len(trained), trained[-1].group_id)
    except TimeoutError:
        pass
    finally:
        passing.cancel()
    return trained


async def test_bad_prompts_are_set_aside_with_their_reason_and_the_run_goes_on(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    """The engine refuses one, a killed process the other; how else prompts fail, tests of graders say."""
    task = "support.bad_prompts:OneTooLongOneHangs"
    async with (
        running_hub(made, task="t", prompts=PROMPTS, max_staleness_versions=500) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir, custom_tasks={"t": task}, grader_wall_limit_s=0.5),
    ):
        drain = await learner.drain(credits=1000)
        trained = await train(drain, hub.clock, groups=GROUPS)
        assert len(trained) == GROUPS
        assert not any(is_bad(group.prompt_index) for group in trained)

        async def are_abandoned() -> bool:
            hub.clock.advance(3.0)
            return dict((await learner.status()).slots).get("abandoned", 0) >= 2

        # A slot waits WAIT_FOR_OTHERS_S for another sampler, and there is none.
        await eventually(are_abandoned)
        status = await learner.status()
        assert {bad.reason for bad in status.bad_prompts} == {"prompt_too_long", "grading_timed_out"}


async def test_bad_prompts_survive_a_restart_come_back_and_one_success_clears_them(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    settings = {"task": "t", "prompts": PROMPTS, "max_staleness_versions": 500}
    async with (
        running_hub(made, **settings, prompt_retry_s=86400) as hub,  # not before the restart
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir, custom_tasks={"t": "support.bad_prompts:PromptRaises"}),
    ):
        drain = await learner.drain(credits=1000)
        assert len(await train(drain, hub.clock, groups=GROUPS)) == GROUPS
        assert {bad.prompt_index for bad in (await learner.status()).bad_prompts} == {1, 11}
        # Each is tried once: from then on it is kept from the only sampler there is.
        assert hub.metric("heterorl_coordinator_prompt_faults_total", reason="prompt_failed") == 2
    # The task was mended, and whoever runs the coordinator wants its prompts back at once.
    async with (
        running_hub(made, **settings, prompt_retry_s=0) as hub,
        learning(hub, base, model_dir, version=GROUPS) as learner,
        sampling(made, hub.address, model_dir, custom_tasks={"t": "support.bad_prompts:Fine"}),
    ):
        assert (await learner.status()).bad_prompts_total == 2
        drain = await learner.drain(credits=1000, version=GROUPS)
        trained = await train(drain, hub.clock, groups=2 * PROMPTS, version=GROUPS)
        assert {1, 11} <= {group.prompt_index for group in trained}
        assert (await learner.status()).bad_prompts_total == 0


async def test_a_prompt_is_made_once_for_a_lease_and_graded_by_the_process_that_made_it(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    """``Drawn`` numbers its calls; the reward of a group is the number that its process drew for it last."""
    async with (
        running_hub(made, task="t", prompts=PROMPTS, max_staleness_versions=500) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(
            made, hub.address, model_dir, custom_tasks={"t": "support.bad_prompts:Drawn"}, grader_processes=1
        ),
    ):
        drain = await learner.drain(credits=1000)
        trained = await train(drain, hub.clock, groups=PROMPTS)
    drawn = [base.tokenizer.decode(group.prompt_token_ids) for group in trained]
    assert len(trained) == PROMPTS
    for group, prompt in zip(trained, drawn, strict=True):
        rewards = {completion.reward for completion in group.completions}
        assert {f"{group.prompt_index}+{reward:.0f}=" for reward in rewards} == {prompt}
    assert len(set(drawn)) == PROMPTS
