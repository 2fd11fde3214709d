"""A run whose learner merges what two contributors train: all roles as the daemon builds them, over mTLS."""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from bench.forked_context import forked_context
from learner import contributor_role, learner_role
from learner.config import LearnerConfig
from learner.contributor.config import ContributorConfig
from learner.merging.merge_config import MergeConfig
from node.commands.status.status_command import fetch_status
from node.exit_code import ExitCode
from node.identity.identity_store import save_identity
from node.identity.own_identity import OwnIdentity
from node.process.daemon import StartStage, run_daemon
from node.process.role_context import RoleContext
from node.process.service import Service
from node.rpc.calls.server import RpcServer
from node.values.roles import Role
from support.identity import MadeRun
from support.made_up_run import coordinator, sampling
from support.rank_contributors import serve_contributor
from support.roles import role_context
from support.tiny_model import make_tiny_model
from support.waiting import until

LONGEST_S = 120.0
VERSIONS = 6
"""Each consumes up to 8 groups, where the coordinator's batches have 2 and its bound on staleness is 16: had
it leased 2 for a version, there would be none after the fifth."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def contributor_context(made: MadeRun, name: str, hub: str, learner: str, model_dir: Path) -> RoleContext:
    config = ContributorConfig(learner=learner, model_dir=model_dir, device="cpu", threads=1)
    context = role_context(made, Role.CONTRIBUTOR, config, hub=hub)
    state_dir = made.directory / name
    state_dir.mkdir()
    identity = OwnIdentity(made.issue(Role.CONTRIBUTOR, name), state_dir)
    return replace(context, node_id=name, state_dir=state_dir, identity=identity)


async def run_until_left(services: Sequence[Service], stopping: asyncio.Event) -> None:
    """Run a contributor's services until they have stopped."""
    async with asyncio.TaskGroup() as tasks:
        for service in services:
            tasks.create_task(service.run(ready=lambda: None, stopping=stopping))


def merging(model_dir: Path, *, versions: int = VERSIONS, **merge: Any) -> LearnerConfig:
    plain: dict[str, Any] = {"listen": "127.0.0.1:0", "restart_wait_s": 0.0}
    return LearnerConfig(
        model_dir=model_dir,
        learning_rate=1e-3,
        quarantine_mismatch_nats=math.inf,
        threads=1,
        device="cpu",
        max_versions=versions,
        merge=MergeConfig.model_validate(plain | merge),
    )


@asynccontextmanager
async def learning_at(
    made: MadeRun, hub: str, config: LearnerConfig
) -> AsyncIterator[tuple[str, "asyncio.Task[ExitCode]"]]:
    """Run a learner that merges; yield where contributors reach it, and what it ends with."""
    services = await learner_role.build(role_context(made, Role.LEARNER, config, hub=hub))
    [server] = [one for one in map(_unwrapped, services) if isinstance(one, RpcServer)]

    async def build() -> list[Service]:
        return services

    learning = asyncio.create_task(
        run_daemon([StartStage("learner", build)], drain_timeout_s=10, announce=lambda _: None)
    )
    try:
        await until(lambda: not server.address.endswith(":0"))
        yield server.address, learning
    finally:
        learning.cancel()
        await asyncio.wait({learning})


def merged_lines(made: MadeRun) -> list[dict[str, Any]]:
    path = made.directory / "learner" / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_each_group_counts_once(made: MadeRun, *, versions: int = VERSIONS) -> None:
    lines = merged_lines(made)
    assert [line["version"] for line in lines] == list(range(1, versions + 1))
    trained = [group["group_id"] for line in lines for group in line["groups"]]
    assert len(set(trained)) == len(trained) >= 2 * versions


async def test_two_contributors_train_what_the_learner_merges_and_publishes(
    made: MadeRun, model_dir: Path
) -> None:
    names = ("contributor-1", "contributor-2")
    config = merging(model_dir, method="word_changes", local_steps=2)
    async with (
        coordinator(made) as hub,
        sampling(made, hub, model_dir),
        learning_at(made, hub, config) as (learner, learning),
    ):
        contexts = [contributor_context(made, name, hub, learner, model_dir) for name in names]
        # One after the other: transformers loads no two models at once in a process.
        built = [await contributor_role.build(one) for one in contexts]
        stopping = asyncio.Event()
        contributors = [asyncio.create_task(run_until_left(one, stopping)) for one in built]
        try:
            async with asyncio.timeout(LONGEST_S):
                done, _ = await asyncio.wait({learning, *contributors}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {learning}:
                    task.result()
                assert learning.result() is ExitCode.DRAINED
                status = await fetch_status(hub, made.of(Role.OPERATOR))
                stopping.set()
                await asyncio.gather(*contributors)
        finally:
            for task in contributors:
                task.cancel()
            await asyncio.wait(contributors)
    check_each_group_counts_once(made)
    assert {peer.node_id for peer in status.peers if peer.role is Role.CONTRIBUTOR} == set(names)
    merged = [
        one.registry.get_sample_value("heterorl_contributor_contributions_total", {"outcome": "merged"})
        for one in contexts
    ]
    assert sum(count or 0 for count in merged) >= VERSIONS


@pytest.mark.timeout(400)  # four processes, on two cores that other tests use too
@pytest.mark.usefixtures("warm_server")
async def test_a_contributor_whose_rank_is_killed_ends_and_its_groups_are_trained_once(
    made: MadeRun, model_dir: Path
) -> None:
    """Two stages of a pipeline; the next start goes on, and SIGTERM drains it with its other rank."""
    directory = made.directory / "ranked"
    save_identity(made.contributor, directory)
    made.run.save(directory / "run.json")
    config = merging(model_dir, versions=12, method="in_step", member_timeout_s=1.0)
    async with (
        coordinator(made) as hub,
        sampling(made, hub, model_dir),
        learning_at(made, hub, config) as (learner, learning),
    ):
        ranked = ContributorConfig(learner=learner, model_dir=model_dir, device="cpu", threads=1, pp=2)
        context = forked_context()

        async def started() -> tuple[BaseProcess, int]:
            told, tells = context.Pipe(duplex=False)
            process = context.Process(target=serve_contributor, args=(directory, hub, ranked, tells))
            process.start()
            return process, await asyncio.to_thread(told.recv)

        first, rank = await started()
        await until(lambda: len(merged_lines(made)) >= 1, within_s=120)
        os.kill(rank, signal.SIGKILL)
        await asyncio.to_thread(first.join)
        assert first.exitcode == ExitCode.FAILED
        again, _ = await started()
        async with asyncio.timeout(120):
            assert await asyncio.shield(learning) is ExitCode.DRAINED
        again.terminate()
        await asyncio.to_thread(again.join)
        assert again.exitcode == ExitCode.DRAINED
    check_each_group_counts_once(made, versions=12)


def _unwrapped(service: Any) -> Any:
    return getattr(service, "service", service)
