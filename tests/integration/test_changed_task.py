"""A run's task changed while it goes on: options, grader code, rows."""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.clients.rollouts.check_stream import RewardCheckClient
from node.errors import Reason
from node.exit_code import ExitCode
from node.values.groups.reward_finding import RewardFinding
from node.values.groups.rollout import RolloutGroup
from node.wire.rollouts import encoded_from_wire, group_from_wire
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import joined, running_hub
from support.identity import MadeRun
from support.learning import trained
from support.refusals import refused
from support.sampler import learning, sampling
from support.waiting import WITHIN_S, eventually, until

GRADE = "def grade(row, completion):\n    return 1.0\n"
A, B = b"a" * 16, b"b" * 16


def write(path: Path, rows: int, *, first: int = 0) -> None:
    with path.open("a") as file:
        for n in range(first, first + rows):
            file.write(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a coordinator with ten rows, two of them held out."""
    write(tmp_path / "sums.jsonl", 10)
    return {
        "task": "jsonl",
        "prompts": None,
        "data": {"file": tmp_path / "sums.jsonl", "evaluation_rows": 2},
        "task_options": {"grader": "contains"},
        "max_staleness_versions": 500,
    }


async def test_groups_graded_by_other_options_are_refused_by_name_and_what_waited_is_leased_again(
    made: MadeRun, settings: dict[str, Any]
) -> None:
    async with joined(made, **settings) as (hub, learner, sampler):
        await learner.drain()
        spooled, late = (await sampler.lease(2)).leases
        assert (await sampler.submit(spooled)).verdict == common_pb2.VERDICT_SPOOLED
    settings["task_options"] = {"grader": "number"}
    async with running_hub(made, **settings) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        assert hub.metric("heterorl_coordinator_misgraded_groups_total", what="task options") == 1
        await learner.join()
        digest = (await sampler.join()).task_digest
        await learner.drain()
        await hub.has_heard_learner()
        assert digest != late.task_digest
        answer = await sampler.submit(late)
        assert answer.verdict == common_pb2.VERDICT_FOREIGN
        assert late.task_digest.hex() in answer.detail
        assert digest.hex() in answer.detail
        leases = {lease.lease_id: lease for lease in (await sampler.lease(2)).leases}
        assert leases.keys() == {"0.2", "1.2"}
        assert {lease.task_digest for lease in leases.values()} == {digest}
        assert (await sampler.submit(leases["0.2"])).verdict == common_pb2.VERDICT_SPOOLED
        assert hub.metric("heterorl_coordinator_misgraded_groups_total", what="task options") == 2


async def test_a_sampler_with_another_grader_leases_nothing_and_its_group_is_refused_by_name(
    made: MadeRun, settings: dict[str, Any]
) -> None:
    settings["grader_digest"] = A.hex()
    async with running_hub(made, **settings) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join()
        await sampler.join(grader_digest=A)
        await learner.drain()
        (lease,) = (await sampler.lease(1)).leases
        told = await sampler.join(grader_digest=B)
        assert (told.grader_digest, told.grader_said_by) == (A, "the coordinator's configuration")
        none = await sampler.lease(1)
        assert (list(none.leases), none.waits_for) == ([], "grader")
        answer = await sampler.submit(lease, grader_digest=B)
        assert answer.verdict == common_pb2.VERDICT_FOREIGN
        assert f"{B.hex()} is not the run's {A.hex()}" in answer.detail
        status = await sampler.status()
        assert status.grader_digest == A
        assert [peer.grader_digest for peer in status.peers if peer.node_id == "sampler-1"] == [B]
        assert hub.metric("heterorl_coordinator_misgraded_groups_total", what="grader code") == 1


async def test_no_number_of_samplers_shuts_out_another_by_its_grader(
    made: MadeRun, settings: dict[str, Any]
) -> None:
    names = [made.other_sampler, *(made.issue(made.sampler.role, f"liar-{number}") for number in range(2))]
    async with (
        joined(made, made.sampler, *names, **settings) as (hub, learner, sampler, *liars),
        hub.peer(made.verifier) as verifier,
    ):
        for liar in liars:
            await liar.join(grader_digest=B)
        assert (await sampler.join(grader_digest=A)).grader_digest == b""
        await learner.drain()
        (lease,) = (await sampler.lease(1)).leases
        assert (await sampler.submit(lease, grader_digest=A)).verdict == common_pb2.VERDICT_SPOOLED
        assert (await verifier.join(grader_digest=A)).grader_said_by == f"verifier {made.verifier.node_id}"
        for liar in liars:
            answer = await liar.lease(1)
            assert (list(answer.leases), answer.waits_for) == ([], "grader")
        assert (await sampler.lease(1)).leases


async def test_a_verifier_with_another_grader_than_the_configured_one_checks_nothing_and_is_told_why(
    made: MadeRun, settings: dict[str, Any]
) -> None:
    settings["grader_digest"] = A.hex()
    async with running_hub(made, **settings) as hub, hub.peer(made.verifier) as verifier:
        joined_as = await verifier.join(grader_digest=B)

        async def check(group: RolloutGroup, row: bytes) -> RewardFinding:
            raise AssertionError(group)

        with refused(Reason.BUSY, f"{B.hex()} is not the run's {A.hex()}"):
            await RewardCheckClient(verifier.channel).answer(
                check,
                task_digest=joined_as.task_digest,
                groups=1,
                noise_ratio=0.0,
                grades_at_once=1,
                grading_limit_s=30.0,
            )


async def test_rows_are_added_while_the_run_goes_on_and_the_old_ones_keep_their_numbers(
    made: MadeRun, settings: dict[str, Any]
) -> None:
    async with joined(made, **settings) as (hub, learner, sampler):
        await learner.drain()
        before = {lease.lease_id: lease for lease in (await sampler.lease(3)).leases}
    write(settings["data"]["file"], 30, first=10)
    async with running_hub(made, **settings) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join()
        assert (await sampler.join()).prompts == 38
        await learner.drain()
        await hub.has_heard_learner()
        for lease in before.values():
            assert (await sampler.submit(lease)).verdict == common_pb2.VERDICT_SPOOLED
        leases: list[rollout_pb2.PromptLease] = []
        while len(leases) < 38:  # a newcomer gets an eighth of the room, and more for each group
            granted = (await sampler.lease(38 - len(leases))).leases
            assert granted
            assert (await sampler.submit(granted[0])).verdict == common_pb2.VERDICT_SPOOLED
            leases += granted
        assert sorted(lease.prompt_index for lease in leases) == [*range(8), *range(10, 40)]
        for lease in leases:
            assert json.loads(lease.row)["answer"] == lease.prompt_index + 1


async def test_a_sampler_waits_for_options_it_can_have_loads_those_and_new_rows_and_goes_on(
    made: MadeRun, base: TorchEngine, model_dir: Path, settings: dict[str, Any]
) -> None:
    async with AsyncExitStack() as stack:
        async with running_hub(made, **settings) as hub, learning(hub, base, model_dir) as learner:
            address = hub.address
            sampler = await stack.enter_async_context(sampling(made, address, model_dir))
            await trained(await learner.drain(credits=1000), groups=3)
            await until(lambda: hub.metric("heterorl_coordinator_groups_total", verdict="trained") == 3)
        settings |= {"listen": address, "task_options": {"grader": "own:grade"}}
        async with (
            running_hub(made, **settings) as hub,
            learning(hub, base, model_dir, version=3) as learner,
        ):

            async def waits() -> bool:
                peers = (await learner.status()).peers
                return any(peer.waits_for == "task that loads here" for peer in peers)

            await eventually(waits)
        settings["task_options"] = {"grader": "number", "system": "add"}
        write(settings["data"]["file"], 5, first=10)
        async with (
            running_hub(made, **settings) as hub,
            learning(hub, base, model_dir, version=3) as learner,
        ):
            drain = await learner.drain(credits=1000, version=3)
            response = await drain.hear()
            group = group_from_wire(encoded_from_wire(response.group))
            assert base.tokenizer.decode(np.frombuffer(group.prompt_token_ids, "<i4")).startswith("add")
            assert not sampler.ending.done()
            assert await sampler.drained() is ExitCode.DRAINED


async def test_a_grader_edited_while_the_sampler_runs_is_loaded_again_and_told_before_it_grades(
    made: MadeRun,
    base: TorchEngine,
    model_dir: Path,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "edited_grader.py").write_text(GRADE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    settings["task_options"] = {"grader": "edited_grader:grade"}
    not_graders = set(psutil.Process().children(recursive=True))
    async with (
        running_hub(made, **settings) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir, allowed_graders=["edited_grader:grade"]) as sampler,
    ):
        drain = await learner.drain(credits=1000)
        first = await trained(drain, groups=2)
        (tmp_path / "edited_grader.py").write_text(GRADE.replace("1.0", "0.5"))
        # The process ends, as at a limit, and the next one loads the edited file.
        for worker in set(psutil.Process().children(recursive=True)) - not_graders:
            worker.kill()
        was = first[0].grader_digest
        changed: list[Any] = []
        version = 2
        async with asyncio.timeout(WITHIN_S):
            while not changed:
                response = await drain.hear()
                if response.WhichOneof("message") == "group":
                    version += 1
                    group = group_from_wire(encoded_from_wire(response.group))
                    await drain.step(version, group.group_id)
                    rewards = {completion.reward for completion in group.completions}
                    assert rewards == ({1.0} if group.grader_digest == was else {0.5})
                    changed += [group] if group.grader_digest != was else []
        assert not sampler.ending.done()
