"""The learner as the daemon runs it, with a real coordinator over mTLS and a sampler made of its clients."""

import asyncio
import math
import time
from html import escape
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bench.forked_context import forked_context
from bench.held_policy import HeldPolicy
from deploy.runs.records import differing_groups
from learner import learner_role
from learner.config import LearnerConfig
from learner.journal.checkpoint import opened_masters
from learner.journal.checkpoint_index import versions_in
from learner.masters.tensor_files import load_tensors
from learner.model.model import load_policy
from learner.publishing.kept_versions import published_versions
from learner.ranks import launching
from node.commands.status.status_command import fetch_status
from node.coordinator import coordinator_role as coordinator_role
from node.coordinator.ledger.ledger_check import examine, reading
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.errors import StartupError
from node.exit_code import ExitCode
from node.page.samples_file import SamplesFile
from node.process.daemon import StartStage, run_daemon
from node.process.role_context import RoleContext
from node.process.service import Service
from node.step_log_parts import log_lines
from node.values.groups.verdict import Verdict
from node.values.operator_order import ROLLBACK, Order
from node.values.policy import NO_BASE, PolicyVersion
from node.values.roles import Role
from node.weights.store.artifact_store import ArtifactStore
from support.identity import MadeRun, make_run
from support.made_up_run import coordinator, sampling
from support.orders import give
from support.rank_processes import WarmRank
from support.roles import role_context
from support.waiting import until

LONGEST_S = 240.0
"""For a life of the learner: a bound on what hangs, not on how busy the machine is."""


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

    lines = list(log_lines(made.directory / "learner" / "steps.jsonl"))
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
        await until(lambda: told[Verdict.UNINFORMATIVE] >= 2 * 20)  # more than the bound allows
        status = await fetch_status(hub, made.of(Role.OPERATOR))
        assert status.head is None
        assert status.step is None
        assert status.slots["trained"] == 0
        assert status.slots["uninformative"] >= 2 * 20
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
