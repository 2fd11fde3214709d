"""Rollbacks and settings that an operator orders, at a learner that trains."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.journal.checkpoint_index import versions_in
from learner.journal.progress import SettingChange
from learner.masters.master_words import root_of
from learner.model.model import Policy
from learner.operator_orders import recent_changes
from learner.publishing.earlier_versions import STAGED
from node.values.groups.verdict import Verdict
from node.values.operator_order import ROLLBACK, SET, Order
from node.values.run import StepRecord
from support.scripted_hub import ScriptedHub, scripted_hub
from support.training_loop import BATCH, RunningLearner, learner
from support.waiting import until

KEEPS_ALL: dict[str, Any] = {"keep_every_versions": 1}
"""Masters of each version, since nothing is published here."""


def parameters(policy: Policy) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.tensors.values()]).clone()


def root(running: RunningLearner) -> bytes:
    return root_of(running.policy.master_words)


async def take_steps(hub: ScriptedHub, running: RunningLearner, *, until_version: int) -> None:
    for version in range(running.loop.version, until_version):
        names = (f"{BATCH * version + n}.1" for n in range(BATCH))
        await hub.give(*(running.delivered(name, version=version) for name in names))
        await until(lambda: (version + 1, BATCH) in running.written)  # noqa: B023 - awaited at once


async def roll_back(hub: ScriptedHub, version: int, *, name: str = "first", at_s: float = 1.0) -> None:
    await hub.order(Order(ROLLBACK, value=str(version), order_id=name, at_s=at_s))


async def change(hub: ScriptedHub, key: str, value: object, *, name: str, held: str = "") -> None:
    """Order a value of a setting; None: the configuration's."""
    text = "" if value is None else json.dumps(value)
    await hub.order(Order(SET, f"learner.{key}", text, order_id=name, is_undone=value is None, held=held))
    await hub.wait_until(lambda: bool(hub.answers) and hub.answers[-1].order_id == name)


def lines(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state / "steps.jsonl").read_text().splitlines()]


async def test_a_rollback_makes_the_next_version_of_an_earlier_ones_words_and_is_told_when_it_is_durable(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, **KEEPS_ALL) as running:
        await take_steps(hub, running, until_version=1)
        first = root(running)
        await take_steps(hub, running, until_version=3)
        assert root(running) != first
        await roll_back(hub, 1)
        await hub.wait_until(lambda: hub.records[-1] == StepRecord(4, (), (), restored_version=1))
        assert versions_in(tmp_path / "checkpoints")[-1] == 4
        assert root(running) == first
        assert running.access.take() == running.loop.version == 4
        running.access.release()
        assert running.shown("rollbacks_total") == 1
        assert not (tmp_path / STAGED).exists()
        assert all(not moment.any() for moment in moments(running))
        await until(lambda: len(lines(tmp_path)) == 4)
        assert running.report is None
        await take_steps(hub, running, until_version=6)
        [told] = recent_changes(running.state.progress, now=0.0)
        assert told == "a rollback: version 4 has the weights of 1"
    told_of = lines(tmp_path)[3]
    assert (told_of["version"], told_of["restored_version"], told_of["groups"]) == (4, 1, [])
    assert [line["version"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [record.version for record in hub.records] == [1, 2, 3, 4, 5, 6]
    assert Counter(hub.trained_group_ids).most_common(1)[0][1] == 1


def moments(running: RunningLearner) -> list[torch.Tensor]:
    states = running.state.trainer.optimizer.state.values()
    return [moment for state in states for moment in state.values()]


async def test_groups_from_before_a_rollback_are_refused_as_stale_and_those_from_it_on_are_taken(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, **KEEPS_ALL) as running:
        await take_steps(hub, running, until_version=2)
        await hub.give(running.delivered("80.1", version=2))
        await hub.wait_until(lambda: hub.verdicts_of("80.1") == [Verdict.ACCEPTED])
        await roll_back(hub, 1)
        await hub.wait_until(lambda: hub.records[-1].restored_version == 1)
        await hub.wait_until(lambda: hub.verdicts_of("80.1")[-1] is Verdict.STALE)
        await hub.give(running.delivered("81.1", version=2), running.delivered("82.1", version=3))
        await hub.wait_until(lambda: hub.verdicts_of("81.1") == [Verdict.STALE])
        await hub.wait_until(lambda: hub.verdicts_of("82.1") == [Verdict.ACCEPTED])


async def test_a_learner_that_was_down_or_is_started_again_carries_an_order_out_once(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub:
        async with learner(hub, model_dir, tmp_path, **KEEPS_ALL) as running:
            await take_steps(hub, running, until_version=2)
            base = running.published[0].root
        await roll_back(hub, 0)  # the base model
        async with learner(hub, model_dir, tmp_path, **KEEPS_ALL) as running:
            await until(lambda: running.loop.version == 3)
            assert root(running) == base
        async with learner(hub, model_dir, tmp_path, **KEEPS_ALL) as running:
            await take_steps(hub, running, until_version=4)
            restored = running.state.progress.rollback
            assert restored is not None
            assert (restored.order, restored.version, restored.restored_version) == ("first", 3, 0)
        assert [record.version for record in hub.records] == [1, 2, 3, 4]


async def test_a_learner_killed_before_the_checkpoint_of_a_rollback_has_taken_none_and_then_takes_it(
    model_dir: Path, tmp_path: Path
) -> None:
    """A restart knows a rollback by its checkpoint alone: without it, the rollback is still to come."""
    state, left = tmp_path / "a", tmp_path / "b"
    async with scripted_hub() as hub, learner(hub, model_dir, state, **KEEPS_ALL) as running:
        await take_steps(hub, running, until_version=2)
        await until(lambda: versions_in(state / "checkpoints") == [1, 2])
        await roll_back(hub, 1)
        await until(lambda: running.loop.version == 3)
        shutil.copytree(state, left)
        shutil.rmtree(left / "checkpoints" / "000000000003")
        (left / "steps.jsonl").write_text("".join((left / "steps.jsonl").read_text().splitlines(True)[:2]))
    async with scripted_hub() as hub:
        await roll_back(hub, 1)
        async with learner(hub, model_dir, left, **KEEPS_ALL) as running:
            assert running.state.restart.version == 2
            await until(lambda: running.loop.version == 3)
            await take_steps(hub, running, until_version=4)
    async with scripted_hub() as hub:
        await roll_back(hub, 1)  # as if the answer had been lost
        async with learner(hub, model_dir, left, **KEEPS_ALL) as running:
            await hub.wait_until(lambda: bool(hub.answers))
            assert running.loop.version == 4
            assert not hub.answers[0].is_refused


async def test_a_rollback_that_was_ordered_before_the_newest_one_is_not_carried_out_after_it(
    model_dir: Path, tmp_path: Path
) -> None:
    """As from a ledger that was restored from a backup."""
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, **KEEPS_ALL) as running:
        await take_steps(hub, running, until_version=2)
        await roll_back(hub, 1, name="new", at_s=2.0)
        await hub.wait_until(lambda: bool(hub.answers))
        await roll_back(hub, 0, name="old", at_s=1.0)
        await hub.wait_until(lambda: len(hub.answers) == 2)
        assert [(one.order_id, one.is_refused) for one in hub.answers] == [("new", False), ("old", True)]
        assert running.loop.version == 3


async def test_an_order_that_cannot_be_carried_out_is_said_why_and_training_goes_on(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await take_steps(hub, running, until_version=2)
        with caplog.at_level(logging.ERROR):
            await roll_back(hub, 1)
            await until(lambda: "order refused" in caplog.messages)
            await roll_back(hub, 2, name="second")
            await until(lambda: caplog.messages.count("order refused") == 2)
        details = [getattr(record, "detail", "") for record in caplog.records]
        assert "version 1 " in details[0]
        assert "the newest version is 2" in details[1]
        await take_steps(hub, running, until_version=3)
    assert [record.restored_version for record in hub.records] == [None] * 3


async def test_a_setting_that_is_ordered_holds_from_the_next_step_on_and_is_recorded_with_it(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub:
        async with learner(hub, model_dir, tmp_path, objective="grpo") as running:
            await take_steps(hub, running, until_version=1)
            await change(hub, "learning_rate", 5e-4, name="rate")
            await change(hub, "objective_options.clip_high", 0.1, name="clip")
            await take_steps(hub, running, until_version=2)
        async with learner(hub, model_dir, tmp_path, objective="grpo") as running:
            await take_steps(hub, running, until_version=3)  # they hold after a restart
            await change(hub, "learning_rate", None, name="no rate", held="0.0005")
            await change(hub, "objective_options.clip_high", None, name="no clip", held="0.1")
            await take_steps(hub, running, until_version=4)
            told = recent_changes(running.state.progress, now=0.0)
    rates = [line["learning_rate"] for line in lines(tmp_path)]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 1e-3])
    options = "objective_options"
    assert lines(tmp_path)[1]["changed_settings"] == {
        "learning_rate": ["0.001", "0.0005"],
        options: ["{}", '{"clip_high": 0.1}'],
    }
    assert [line["changed_settings"] == {} for line in lines(tmp_path)] == [True, False, True, False]
    assert "learning_rate 0.0005 -> 0.001 since step 4" in told


async def test_a_rate_that_was_changed_in_the_configuration_is_recorded_with_its_first_step(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub:
        async with learner(hub, model_dir, tmp_path) as running:
            await take_steps(hub, running, until_version=1)
        async with learner(hub, model_dir, tmp_path, learning_rate=2e-3) as running:
            await take_steps(hub, running, until_version=2)
            [change] = running.state.progress.changes
    assert (change.version, change.key, change.was, change.is_now) == (2, "learning_rate", "0.001", "0.002")
    assert isinstance(change, SettingChange)


async def test_a_setting_that_breaks_its_rule_is_refused_and_the_one_before_holds(
    model_dir: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    async with scripted_hub() as hub:
        async with learner(hub, model_dir, tmp_path, objective="grpo") as running:
            await change(hub, "learning_rate", 5e-4, name="good")
            for name, key, value, named in (
                ("too large", "learning_rate", 7.0, "1"),
                ("of another type", "learning_rate", "fast", "number"),
                ("not to be set", "model_dir", "/x", "learning_rate"),
                ("no such option", "objective_options.clip_higher", 0.1, "clip_high"),
            ):
                with subtests.test(name):
                    await change(hub, key, value, name=name, held="0.0005" if key == "learning_rate" else "")
                    assert hub.answers[-1].is_refused
                    assert named in hub.answers[-1].answer
            await take_steps(hub, running, until_version=1)
        async with learner(hub, model_dir, tmp_path, objective="grpo") as running:
            await take_steps(hub, running, until_version=2)
    assert [line["learning_rate"] for line in lines(tmp_path)] == pytest.approx([5e-4, 5e-4])
