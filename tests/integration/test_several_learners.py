"""A run whose learner merges what two contributors train: all roles as the daemon builds them, over mTLS."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner import learner_role
from learner.config import LearnerConfig
from learner.contributor import contributor_role
from learner.contributor.config import ContributorConfig
from learner.merging.merge_config import MergeConfig
from node.commands.status.status_command import fetch_status
from node.exit_code import ExitCode
from node.identity.own_identity import OwnIdentity
from node.process.daemon import StartStage, run_daemon
from node.process.role_context import RoleContext
from node.process.service import Service
from node.rpc.calls.server import RpcServer
from node.values.run import Role
from support.identity import MadeRun
from support.made_up_run import coordinator, sampling
from support.roles import role_context
from support.tiny_model import make_tiny_model
from support.waiting import until

LONGEST_S = 120.0
VERSIONS = 8
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


@pytest.mark.parametrize("method", ["in_step", "word_changes"])
async def test_two_contributors_train_what_the_learner_merges_and_publishes(
    made: MadeRun, model_dir: Path, method: str
) -> None:
    merge: dict[str, Any] = {"listen": "127.0.0.1:0", "method": method, "restart_wait_s": 0.0}
    config = LearnerConfig(
        model_dir=model_dir,
        learning_rate=1e-3,
        quarantine_mismatch_nats=math.inf,
        threads=1,
        device="cpu",
        max_versions=VERSIONS,
        merge=MergeConfig.model_validate(merge | ({"local_steps": 2} if method != "in_step" else {})),
    )
    names = ("contributor-1", "contributor-2")
    async with coordinator(made) as hub, sampling(made, hub, model_dir):
        context = role_context(made, Role.LEARNER, config, hub=hub)
        services = await learner_role.build(context)
        [server] = [one for one in map(_unwrapped, services) if isinstance(one, RpcServer)]

        async def build() -> list[Service]:
            return services

        learning = asyncio.create_task(
            run_daemon([StartStage("learner", build)], drain_timeout_s=10, announce=lambda _: None)
        )
        await until(lambda: not server.address.endswith(":0"))
        contexts = [contributor_context(made, name, hub, server.address, model_dir) for name in names]
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
            for task in (learning, *contributors):
                task.cancel()
            await asyncio.wait({learning, *contributors})
    lines = [
        json.loads(line) for line in (made.directory / "learner" / "steps.jsonl").read_text().splitlines()
    ]
    assert [line["version"] for line in lines] == list(range(1, VERSIONS + 1))
    trained = [group["group_id"] for line in lines for group in line["groups"]]
    assert len(set(trained)) == len(trained) >= 2 * VERSIONS
    assert {peer.node_id for peer in status.peers if peer.role is Role.CONTRIBUTOR} == set(names)
    merged = [
        one.registry.get_sample_value("heterorl_contributor_contributions_total", {"outcome": "merged"})
        for one in contexts
    ]
    assert sum(count or 0 for count in merged) >= VERSIONS


def _unwrapped(service: Any) -> Any:
    return getattr(service, "service", service)
