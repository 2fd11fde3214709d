"""The learner as the daemon runs it, with a real coordinator over mTLS and a sampler made of its clients."""

import asyncio
import contextlib
import io
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console

from bench.forked_context import forked_context
from bench.held_policy import HeldPolicy
from deploy.runs.records import differing_groups
from learner import learner_role
from learner.config import LearnerConfig
from learner.journal.checkpoint import opened_masters
from learner.journal.checkpoint_index import versions_in
from learner.masters.tensor_files import load_tensors
from learner.model.model import Policy, load_policy
from learner.publishing.kept_versions import published_versions
from learner.ranks import launching
from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.clients.rollouts.rollout_client import SamplerRolloutClient
from node.commands.status.status_command import fetch_status
from node.commands.status.status_view import render
from node.coordinator import coordinator_role as coordinator_role
from node.coordinator.config import CoordinatorConfig
from node.coordinator.ledger.ledger_check import examine, reading
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.lifecycle.coordinator_service import CoordinatorService
from node.errors import StartupError
from node.exit_code import ExitCode
from node.page.samples_file import SamplesFile
from node.process.daemon import StartStage, run_daemon
from node.process.role_context import RoleContext
from node.process.service import Service
from node.rpc.channel import Purpose, dial
from node.step_log_parts import log_lines
from node.system.backoff import Backoff
from node.system.clock import SystemClock
from node.text.tokenizer import chat_template_digest, tokenizer_digest
from node.values.groups.rollout import Completion, PromptLease, RolloutGroup
from node.values.groups.verdict import Verdict
from node.values.operator_order import ROLLBACK, Order
from node.values.policy import NO_BASE, PolicyVersion
from node.values.run import Role
from node.weights.store.artifact_store import ArtifactStore
from node.wire.rollouts import group_to_wire
from support.groups import make_completion, make_group
from support.identity import MadeRun, make_run
from support.made_up_groups import completion_logprob
from support.orders import give
from support.rank_processes import WarmRank
from support.roles import role_context
from support.waiting import until

CLOCK = SystemClock()

LONGEST_S = 240.0
"""For a life of the learner: a bound on what hangs, not on how busy the machine is."""


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


async def learn(
    made: MadeRun,
    hub: str,
    model_dir: Path,
    *,
    max_versions: int,
    quarantine_mismatch_nats: float = 0.2,
    ranks: int = 1,
) -> tuple[ExitCode, RoleContext]:
    """Run the learner's daemon until it ends by itself."""
    config = LearnerConfig(
        model_dir=model_dir,
        learning_rate=1e-3,
        threads=1,
        keyframe_every_versions=2,
        samples_every_versions=2,
        samples_groups=1,
        reference_kl_coefficient=0.01,
        max_versions=max_versions,
        quarantine_mismatch_nats=quarantine_mismatch_nats,
        dp_shard=ranks,
    )
    context = role_context(made, Role.LEARNER, config, hub=hub)

    async def build() -> list[Service]:
        return await learner_role.build(context)

    async with asyncio.timeout(LONGEST_S):
        code = await run_daemon([StartStage("learner", build)], drain_timeout_s=10, announce=lambda _: None)
    return code, context


def version_in_checkpoint(made: MadeRun, model_dir: Path) -> PolicyVersion:
    policy = load_policy(model_dir, device="cpu")
    checkpoints = made.directory / "learner" / "checkpoints"
    [*_, version] = versions_in(checkpoints)
    with opened_masters(checkpoints, version, layout=policy.layout) as masters:
        load_tensors(masters, {name: one.detach() for name, one in policy.tensors.items()})
    words = np.empty(policy.layout.words, np.uint16)
    policy.snapshot(words)
    return HeldPolicy.of(version, words, layout=policy.layout).version


async def test_a_learner_trains_publishes_drains_and_goes_on_after_a_restart(
    made: MadeRun, model_dir: Path
) -> None:
    async with coordinator(made) as hub, sampling(made, hub, model_dir):
        assert (await learn(made, hub, model_dir, max_versions=3))[0] is ExitCode.DRAINED
        code, context = await learn(made, hub, model_dir, max_versions=5)
        assert code is ExitCode.DRAINED
        status = await fetch_status(hub, made.of(Role.OPERATOR))
    [row] = [peer for peer in status.peers if peer.role is Role.LEARNER]
    assert (row.state, row.waits_for) == ("left", "done: version 5 of 5")

    lines = [
        json.loads(line) for line in (made.directory / "learner" / "steps.jsonl").read_text().splitlines()
    ]
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 5]
    trained = [group["group_id"] for line in lines for group in line["groups"]]
    assert len(set(trained)) == len(trained) == 10
    assert (made.directory / "learner" / "epoch").read_text() == "2\n"

    # The hub can serve the last version to a peer that has nothing but the base model.
    store = ArtifactStore(
        made.directory / "coordinator" / "versions",
        public_key=made.run.learner_public_key,
        run_id=made.run_id,
        retained_keyframes=2,
    )
    announcement = store.announcement()
    assert announcement is not None
    assert announcement.head == version_in_checkpoint(made, model_dir)
    assert announcement.head.number == 5
    assert any(artifact.key.base_version in (NO_BASE, 0) for artifact in announcement.artifacts)

    # Zero at the base model, and measured from there also after a restart from version 3.
    away_nats = [line["reference_kl_nats"] for line in lines]
    assert away_nats[0] == 0.0
    assert min(away_nats[1:]) > 1e-6

    samples = list(SamplesFile(made.directory / "learner" / "samples.jsonl").all())
    assert [group.version for group in samples] == [0, 2, 4]
    assert {group.group_id for group in samples} <= set(trained)
    page = context.page.render()
    assert page is not None
    assert escape(samples[-1].completions[0].text) in page.decode()

    shown = context.registry.get_sample_value
    assert shown("heterorl_learner_version") == shown("heterorl_learner_published_version") == 5
    assert shown("heterorl_learner_trained_tokens_total") == 2 * 2 * 2 * 4


async def _learn_on_two_ranks_then_one(made: MadeRun, model_dir: Path) -> None:
    published = made.directory / "learner" / "published"
    async with coordinator(made) as hub, sampling(made, hub, model_dir):
        assert (await learn(made, hub, model_dir, max_versions=3, ranks=2))[0] is ExitCode.DRAINED
        words0 = (made.directory / "learner" / "base.words").read_bytes()
        assert (await learn(made, hub, model_dir, max_versions=5))[0] is ExitCode.DRAINED
    assert (made.directory / "learner" / "base.words").read_bytes() == words0
    store = ArtifactStore(
        published, public_key=made.run.learner_public_key, run_id=made.run_id, retained_keyframes=2
    )
    assert store.head() == version_in_checkpoint(made, model_dir)
    assert {path.name for path in (published / "complete").iterdir()} >= {"2-key", "4-3", "5-4"}


def learn_on_two_ranks_then_one(directory: Path, model_dir: Path) -> None:
    """Do so in this process, which torch's process group stays in."""
    with mock.patch.object(launching, "Popen", WarmRank):
        asyncio.run(_learn_on_two_ranks_then_one(make_run(directory, now=time.time()), model_dir))


@pytest.mark.timeout(2 * LONGEST_S)
@pytest.mark.usefixtures("warm_server")
def test_a_learner_of_two_ranks_publishes_and_one_rank_goes_on(tmp_path: Path, model_dir: Path) -> None:
    process = forked_context().Process(target=learn_on_two_ranks_then_one, args=(tmp_path / "run", model_dir))
    process.start()
    process.join()
    assert process.exitcode == 0


async def _learn_and_roll_back(made: MadeRun, model_dir: Path, *, ranks: int) -> None:
    state = made.directory / "learner"
    ledger = made.directory / "coordinator" / FILE_NAME
    async with coordinator(made) as hub, sampling(made, hub, model_dir):
        assert (await learn(made, hub, model_dir, max_versions=3))[0] is ExitCode.DRAINED
        earlier = max(version for version in published_versions(state) if version < 3)
        await give(made.directory / "coordinator", Order(ROLLBACK, value=str(earlier), order_id="first"))
        assert (await learn(made, hub, model_dir, max_versions=4, ranks=ranks))[0] is ExitCode.DRAINED
    with reading(ledger) as connection:
        steps = dict(connection.execute("SELECT version, restored_version FROM steps"))
        roots = dict(connection.execute("SELECT number, root FROM versions"))
    assert steps == {1: None, 2: None, 3: None, 4: earlier}
    assert roots[4] == roots[earlier] != roots[3]
    assert version_in_checkpoint(made, model_dir) == PolicyVersion(4, roots[4])
    assert len(list(log_lines(state / "steps.jsonl"))) == 4
    assert differing_groups(ledger, state / "steps.jsonl") == []
    assert examine(ledger).problems == ()


async def test_a_rollback_is_published_under_its_number_and_in_the_ledger(
    made: MadeRun, model_dir: Path
) -> None:
    await _learn_and_roll_back(made, model_dir, ranks=1)


def roll_back_two_ranks(directory: Path, model_dir: Path) -> None:
    """Do so in this process, which torch's process group stays in."""
    with mock.patch.object(launching, "Popen", WarmRank):
        asyncio.run(_learn_and_roll_back(make_run(directory, now=time.time()), model_dir, ranks=2))


@pytest.mark.timeout(2 * LONGEST_S)
@pytest.mark.usefixtures("warm_server")
def test_a_learner_of_two_ranks_rolls_back(tmp_path: Path, model_dir: Path) -> None:
    process = forked_context().Process(target=roll_back_two_ranks, args=(tmp_path / "run", model_dir))
    process.start()
    process.join()
    assert process.exitcode == 0


async def test_a_run_whose_rewards_are_all_equal_takes_no_step_and_says_so_until_one_differs(
    made: MadeRun, model_dir: Path
) -> None:
    rewards = [0.0, 0.0]
    async with (
        coordinator(made) as hub,
        sampling(made, hub, model_dir, reward_of=rewards.__getitem__) as told,
    ):
        steps = learn(made, hub, model_dir, max_versions=1, quarantine_mismatch_nats=math.inf)
        learning = asyncio.create_task(steps)
        await until(lambda: told[Verdict.UNINFORMATIVE] >= 2 * 40)  # more than the bound allows
        status = await fetch_status(hub, made.of(Role.OPERATOR))
        assert status.head is None
        assert status.step is None
        assert status.slots["trained"] == 0
        assert status.slots["uninformative"] >= 2 * 40
        output = io.StringIO()
        Console(file=output, width=400).print(render(status))
        assert "100% of the newest" in output.getvalue()
        assert "no step for 0 min" in output.getvalue()
        rewards[1] = 1.0
        assert (await learning)[0] is ExitCode.DRAINED
        status = await fetch_status(hub, made.of(Role.OPERATOR))
    assert (status.head.number if status.head else 0, status.slots["trained"]) == (1, 2)


async def test_a_signing_key_of_another_run_is_refused_before_anything_is_loaded(
    made: MadeRun, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "elsewhere", now=time.time())
    other.signing_key.save(made.directory / "learner" / "signing.key")
    config = LearnerConfig(model_dir=tmp_path / "no model here", learning_rate=1e-3)
    context = role_context(made, Role.LEARNER, config, hub="127.0.0.1:1")
    with pytest.raises(StartupError, match="not the key that run"):
        await learner_role.build(context)
    (made.directory / "learner" / "signing.key").unlink()
    with pytest.raises(StartupError, match="no signing key"):
        await learner_role.build(context)
