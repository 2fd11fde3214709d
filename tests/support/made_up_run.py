"""A real coordinator over mTLS, and a sampler made of its clients that makes groups up."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from learner.model.model import Policy, load_policy
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.clients.rollouts.rollout_client import SamplerRolloutClient
from node.coordinator import coordinator_role as coordinator_role
from node.coordinator.config import CoordinatorConfig
from node.coordinator.lifecycle.coordinator_service import CoordinatorService
from node.rpc.channel import Purpose, dial
from node.system.backoff import Backoff
from node.system.clock import SystemClock
from node.text.tokenizer import chat_template_digest, tokenizer_digest
from node.values.groups.rollout import Completion, PromptLease, RolloutGroup
from node.values.groups.verdict import Verdict
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.wire.rollouts import group_to_wire
from support.groups import make_completion, make_group
from support.identity import MadeRun
from support.made_up_groups import completion_logprob
from support.roles import role_context

CLOCK = SystemClock()


@asynccontextmanager
async def coordinator(made: MadeRun, *, batch_groups: int = 2) -> AsyncIterator[str]:
    """Serve a hub until the end of the block; gives its address."""
    config = CoordinatorConfig(
        task="addition",
        prompts=1000,
        group_size=2,
        batch_groups=batch_groups,
        max_staleness_versions=16,
        heartbeat_interval_s=0.1,
        listen="127.0.0.1:0",
        enrolment_listen="127.0.0.1:0",
    )
    [hub] = await coordinator_role.build(role_context(made, Role.COORDINATOR, config))
    assert isinstance(hub, CoordinatorService)
    is_ready, stopping = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(hub.run(ready=is_ready.set, stopping=stopping))
    try:
        async with asyncio.timeout(10):
            await is_ready.wait()
        yield hub.address
    finally:
        stopping.set()
        await asyncio.wait_for(serving, timeout=20)


def answer(
    lease: PromptLease, made: MadeRun, model_dir: Path, policy: Policy, *, reward_of: Callable[[int], float]
) -> RolloutGroup:
    """Return a group with the logprobs of ``policy``, so that scoring it again finds nothing wrong."""
    draws = np.random.default_rng(lease.prompt_index)
    prompt = np.array([1, 2, 3], np.int32)

    def written(reward: float) -> Completion:
        token_ids = draws.integers(0, 42, 4).astype(np.int32)
        with torch.no_grad():
            logprob = completion_logprob(policy, prompt, token_ids, temperature=lease.sampling.temperature)
        return make_completion(
            4, reward=reward, token_ids=token_ids, behaviour_logprob=logprob.float().numpy()
        )

    completions = tuple(written(reward_of(i)) for i in range(lease.group_size))
    return make_group(
        lease.lease_id,
        run_id=made.run_id,
        prompt_index=lease.prompt_index,
        prompt_token_ids=prompt,
        sampling=lease.sampling,
        task_digest=lease.task_digest,
        completions=completions,
        layout_digest=policy.layout.digest,
        tokenizer_digest=tokenizer_digest(model_dir),
    )


@asynccontextmanager
async def sampling(
    made: MadeRun, hub: str, model_dir: Path, *, reward_of: Callable[[int], float] = float
) -> AsyncIterator[Counter[Verdict]]:
    """Lease and submit, always with version 0, until the end of the block; counts the hub's verdicts."""
    policy = load_policy(model_dir, device="cpu")
    layout = policy.layout
    base = layout.base_model(policy.master_words.digests())
    version0 = PolicyVersion(0, base.root)
    control, rollouts = (
        dial(hub, made.sampler, purpose=purpose, now=CLOCK.now())
        for purpose in (Purpose.CONTROL, Purpose.ROLLOUTS)
    )
    verdicts: Counter[Verdict] = Counter()
    membership = MembershipClient(
        control,
        Member(
            made.run_id,
            Role.SAMPLER,
            layout.digest,
            tokenizer_digest(model_dir),
            chat_template_digest(model_dir),
        ),
        Uplink(CLOCK, Backoff(random.random)),
        reports=PeerReports(held=lambda: version0, waits_for=str, base=lambda: base),
        notices=Notices(verdict=lambda said: verdicts.update([said.verdict])),
    )

    async def work() -> None:
        await membership.settings()
        client = SamplerRolloutClient(rollouts)
        pause = Backoff(random.random, first_s=0.02, cap_s=0.05)
        while True:
            grant = await client.lease(4, version0)
            for lease in grant.leases:
                group = answer(lease, made, model_dir, policy, reward_of=reward_of)
                verdict, detail = await client.submit(group_to_wire(group))
                assert verdict is Verdict.SPOOLED, detail
            if not grant.leases:
                await pause.wait()

    stopping = asyncio.Event()
    member = asyncio.create_task(membership.run(ready=lambda: None, stopping=stopping))
    working = asyncio.create_task(work())
    try:
        yield verdicts
    finally:
        working.cancel()
        stopping.set()
        await asyncio.wait({working, member}, timeout=10)
        for channel in (control, rollouts):
            await channel.close(None)
    with contextlib.suppress(asyncio.CancelledError):
        working.result()
