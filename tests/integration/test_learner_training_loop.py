"""The training loop against a hub over a real socket: what is trained on, recorded, told, and how it ends."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from learner.journal import checkpoint
from learner.journal.checkpoint_index import versions_in
from learner.journal.progress import Progress
from learner.objective.entropy_switch import EntropySwitch
from learner.objective.slow_fast import slow_fast_step
from learner.training.completion import TrainingError
from node.clients.rollouts import rollout_drain
from node.errors import StartupError
from node.values.groups.verdict import Verdict
from support.groups import with_rewards
from support.scripted_hub import scripted_hub
from support.training_loop import BATCH, RUN, RunningLearner, Start, learner
from support.waiting import WITHIN_S, until


def words(running: RunningLearner) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    taken = np.empty(running.policy.layout.words, np.uint16)
    running.policy.snapshot(taken)
    return taken


async def ended(running: RunningLearner) -> None:
    """Wait until the loop has ended by itself."""
    await asyncio.wait_for(asyncio.shield(running.tasks[1]), timeout=WITHIN_S)


async def test_groups_become_steps_and_every_consumer_is_told(start: Start) -> None:
    async with start() as running:
        hub = running.hub
        await running.give("0.1", "1.1", "2.1", "3.1")
        await hub.wait_until(lambda: len(hub.records) == 2)
        assert hub.trained_group_ids == ["0.1", "1.1", "2.1", "3.1"]
        assert [record.staleness_versions for record in hub.records] == [(0, 0), (1, 1)]
        await hub.wait_until(lambda: all(hub.verdicts_of(f"{n}.1") == [Verdict.ACCEPTED] for n in range(4)))
        assert running.access.take() == running.loop.version == 2
        running.access.release()
        assert running.report is not None
        assert running.report.reward_mean == 0.5
    assert [line["version"] for line in running.lines] == [1, 2]
    assert running.written == [(1, BATCH), (2, BATCH)]
    group = {"group_id": "2.1", "sampler_id": "sampler-a", "staleness_versions": 1}
    assert running.lines[1]["groups"][0] == group


async def test_no_step_writes_the_masters_while_a_version_is_read_from_them(start: Start) -> None:
    async with start() as running:
        await running.train(0)
        await until(lambda: running.access.has_unread)
        assert running.access.take() == 1
        before, came, begin_writing = words(running), threading.Event(), running.access.begin_writing

        def watched() -> float:
            came.set()
            return begin_writing()

        with mock.patch.object(running.access, "begin_writing", watched):
            await running.give("2.1", "3.1")
            assert await asyncio.to_thread(came.wait, WITHIN_S)
        assert (words(running) == before).all()
        assert running.loop.version == 1
        running.access.release()
        await running.hub.wait_until(lambda: len(running.hub.records) == 2)
        assert (words(running) != before).any()


async def test_a_batch_that_teaches_nothing_is_consumed_without_a_step_a_version_or_a_checkpoint(
    start: Start,
) -> None:
    """Its groups are consumed once; a batch of which one group teaches is trained on as before."""
    equal = with_rewards(0.0, spread=0.0)
    async with start() as running:
        hub = running.hub
        before = {name: tensor.detach().clone() for name, tensor in running.policy.tensors.items()}
        names = [f"{number}.1" for number in range(4)]
        await running.give(*names, completions=equal)
        await hub.wait_until(lambda: all(Verdict.UNINFORMATIVE in hub.verdicts_of(name) for name in names))
        assert (hub.records, running.loop.version, running.access.take()) == ([], 0, None)
        assert versions_in(running.directory / "checkpoints") == []
        assert all(torch.equal(tensor, before[name]) for name, tensor in running.policy.tensors.items())
        assert running.drain.unacknowledged == ()
        gauges = ("uninformative_batches_total", "uninformative_ratio", "reward_mean")
        assert [running.shown(name) for name in gauges] == [2, 1, 0]
        assert running.evidence.teaching is not None
        assert (running.evidence.teaching.groups, running.evidence.teaching.uninformative_groups) == (4, 4)
        assert running.evidence.teaching.idle_s > 0
        assert running.written == [(0, BATCH)]  # the first of them, for `heterorl-node samples`
        await hub.give(running.delivered("4.1", completions=equal), running.delivered("5.1"))
        await hub.wait_until(lambda: len(hub.records) == 1)
        assert hub.records[0].staleness_versions == (0, 0)
        assert hub.trained_group_ids == ["4.1", "5.1"]
        await until(lambda: running.shown("uninformative_ratio") == pytest.approx(5 / 6))
        assert running.evidence.teaching.idle_s == 0
    [line] = running.lines
    assert (line["version"], line["teaching_groups"]) == (1, 1)


async def test_a_step_s_line_says_where_its_time_went(start: Start) -> None:
    async with start() as running:
        await running.train(0)
        await until(lambda: bool(running.written))
    [line] = running.lines
    assert min(line["journal_s"], line["groups_wait_s"]) > 0
    report = running.report
    assert report is not None
    assert report.groups_wait_s == line["groups_wait_s"]
    assert line["masters_wait_s"] >= 0
    assert (line["published_version"], line["publish_s"]) == (7, 0.25)


async def test_a_restarted_learner_goes_on_where_its_checkpoint_stands(start: Start) -> None:
    async with start() as first:
        hub = first.hub
        hub.is_acknowledging = False
        await first.give(*(f"{n}.1" for n in range(5)))
        await hub.wait_until(lambda: len(hub.records) == 2)
        first.tasks[0].cancel()
    hub.records.clear()  # the hub lost what it had not acknowledged
    hub.is_acknowledging = True
    async with start() as second:
        assert second.loop.version == 2
        await second.give("5.1", "6.1", version=2)
        await hub.wait_until(lambda: len(hub.records) == 3)
    assert hub.hellos[-1].version == 2
    assert [record.version for record in hub.records] == [1, 2, 3]
    assert Counter(hub.trained_group_ids) == Counter(["0.1", "1.1", "2.1", "3.1", "5.1", "6.1"])
    assert [line["version"] for line in second.lines] == [1, 2, 3]


async def test_a_group_trained_on_before_is_a_duplicate_after_a_restart(start: Start) -> None:
    async with start() as first:
        hub = first.hub
        await first.give("0.1", "1.1")
        await hub.wait_until(lambda: len(hub.records) == 1)
    # Acknowledged, so that only the checkpoint's memory of trained groups can tell.
    assert first.drain.unacknowledged == ()
    async with start() as second:
        await hub.wait_until(lambda: len(hub.hellos) == 2)
        await second.give("0.1", "1.1")
        await hub.wait_until(lambda: hub.verdicts_of("1.1")[-1] is Verdict.DUPLICATE)
        assert second.shown("doubled_groups_total") == BATCH
    assert Counter(hub.trained_group_ids) == Counter(["0.1", "1.1"])


async def test_a_lost_stream_is_counted_and_begun_again(start: Start) -> None:
    async with start() as running:
        await running.hub.wait_until(lambda: len(running.hub.hellos) == 1)
        await running.hub.cut()
        await running.hub.wait_until(lambda: len(running.hub.hellos) == 2)
        assert running.shown("lost_drain_streams_total") == 1


async def test_a_finished_loop_waits_for_the_acknowledgement_of_its_last_step(start: Start) -> None:
    async with start(max_versions=1) as running:
        running.hub.is_acknowledging = False
        await running.train(0)
        await until(lambda: running.waits_for == "step acknowledgement")
        running.hub.is_acknowledging = True
        await running.hub.cut()
        await ended(running)
        assert running.drain.unacknowledged == ()


async def test_a_stopped_learner_whose_coordinator_is_gone_leaves_within_a_limit_and_sends_its_records_later(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout_drain, "LAST_RECORDS_LIMIT_S", 0.2)
    async with start() as running:
        running.hub.is_acknowledging = False
        await running.train(0)
        await running.hub.wait_until(lambda: len(running.hub.records) == 1)
        await running.hub.close()
        running.stopping.set()
        await asyncio.wait_for(asyncio.gather(*running.tasks), timeout=5)
    [warned] = [record for record in caplog.records if "has not acknowledged" in record.message]
    assert warned.__dict__["versions"] == [1]
    async with scripted_hub() as hub, learner(hub, running.state.config.model_dir, running.directory):
        await hub.wait_until(lambda: [step.version for step in hub.records] == [1])


async def test_the_loop_ends_by_itself_once_the_mean_reward_of_the_window_reaches_the_goal(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Two batches of 0.25 and 0.75 make 0.5; the window goes on across a restart."""
    caplog.set_level("INFO")
    start = partial(start, stop_at_reward=0.5, stop_window_versions=2)
    async with start() as first:
        for version, reward in enumerate((0.5, 0.25)):
            await first.train(version, completions=with_rewards(reward, version=version))
        assert first.state.completion == ""
    async with start() as second:
        await second.train(2, completions=with_rewards(0.75, version=2))
        await ended(second)
        assert second.loop.version == 3
        assert second.state.completion == "done: mean reward 0.5 over 2 batches, the goal is 0.5"
    [complete] = [record for record in caplog.records if record.message == "training complete"]
    assert (complete.__dict__["version"], complete.__dict__["why"]) == (3, second.state.completion)


async def test_gradients_that_are_never_finite_end_the_learner_with_its_version_intact(start: Start) -> None:
    async with start() as running:
        running.policy.tensors["model.norm.weight"].data[0] = torch.inf
        await running.give(*(f"{n}.1" for n in range(6)))
        with pytest.raises(TrainingError, match="3 gradients in a row"):
            await ended(running)
        assert (running.loop.version, running.access.take()) == (0, None)
        await running.hub.wait_until(lambda: len(running.hub.verdicts) == 12)
        counted = Counter(verdict for _, verdict in running.hub.verdicts)
        assert counted == {Verdict.ACCEPTED: 6, Verdict.SUSPECT: 6}


async def test_a_run_whose_batch_this_learner_cannot_hold_ends_it_at_the_start(start: Start) -> None:
    async with start(run=replace(RUN, batch_groups=9)) as running:
        with pytest.raises(StartupError, match="never fills a batch of 9"):
            await ended(running)


async def test_fast_steps_end_for_good_when_the_entropy_jumps_and_a_restart_remembers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """29 entropies of 0 before the first step, which alone has fast steps."""
    calm = EntropySwitch(entropies=(0.0,) * 29)
    monkeypatch.setattr(checkpoint, "Progress", partial(Progress, entropy_switch=calm))
    fast = mock.Mock(wraps=slow_fast_step)
    monkeypatch.setattr("learner.step.train_step.slow_fast_step", fast)
    for version in range(2):
        async with start(fast_steps=1, fast_steps_until_deviations=1.0) as running:
            await running.train(version)
            assert not running.state.progress.entropy_switch.is_on
            assert fast.call_count == 1
