"""The best version: as rewards or evaluations say, written down, and known to the export."""

import asyncio

import pytest

from learner.export import best_in
from learner.journal.progress import BestVersion
from learner.training import coordinator
from node.values.evaluation import EvaluationNotice
from node.values.policy import PolicyVersion
from support.groups import with_rewards
from support.training_loop import BATCH, RunningLearner, Start
from support.waiting import WITHIN_S, until


async def train(running: RunningLearner, version: int, reward: float) -> None:
    """Take a step on a batch of this reward, and publish what it made."""
    await running.train(version, completions=with_rewards(reward, version=version))
    running.published.append(PolicyVersion(version + 1))


def told(best: int | None = None, *, announced: int, under_way: int | None = None) -> EvaluationNotice:
    return EvaluationNotice(best=best, under_way=under_way, announced=announced, is_evaluated=True)


async def ended(running: RunningLearner) -> None:
    await asyncio.wait_for(running.tasks[1], timeout=WITHIN_S)


async def test_rewards_of_batches_that_teach_nothing_count_for_the_goal_and_for_the_best_version(
    start: Start,
) -> None:
    """A task that is solved teaches nothing any more: the run must end, and the export must know."""
    async with start(stop_at_reward=1.0, stop_window_versions=2) as running:
        await train(running, 0, 0.5)
        names = (f"{n}.1" for n in range(2, 2 + 2 * BATCH))
        await running.give(*names, completions=with_rewards(1.0, version=1, spread=0.0))
        await ended(running)
        assert running.loop.version == 1
    assert best_in(running.directory) == BestVersion(1, 1.0)


async def test_it_is_that_of_the_best_window_until_versions_are_evaluated(start: Start) -> None:
    """Batches of 0.75, 0.5, 0.75 and 0.5 by windows of two: 0.625 is reached first, and not exceeded."""
    async with start(stop_window_versions=2) as running:
        await train(running, 0, 0.75)
        assert best_in(running.directory) is None
        for version, reward in ((1, 0.5), (2, 0.75), (3, 0.5)):
            await train(running, version, reward)
        # Published when the batch came that made the window the best.
        assert best_in(running.directory) == BestVersion(1, 0.625)
        await until(lambda: running.shown("best_version") == 1)
    async with start(evaluations=told(3, under_way=4, announced=5), stop_window_versions=2) as running:
        for version in (4, 5):
            await train(running, version, 0.9)
        assert best_in(running.directory) == BestVersion(3)
    async with start(stop_window_versions=2) as running:
        await train(running, 6, 0.95)
        assert best_in(running.directory) == BestVersion(3)


async def test_it_is_written_down_when_it_is_told_and_not_with_the_next_step(start: Start) -> None:
    async with start(evaluations=told(announced=1)) as running:
        await running.train(0)
        assert best_in(running.directory) is None
        running.told.say(told(1, announced=1))
        await until(lambda: best_in(running.directory) == BestVersion(1))
        await until(lambda: running.shown("best_version") == 1)
        running.told.say(told(announced=1))  # those who said so are revoked
        await running.train(1)
        assert best_in(running.directory) == BestVersion(1)  # until another version has a score


async def test_an_evaluation_that_ends_after_the_last_step_is_known_to_the_export(start: Start) -> None:
    async with start(max_versions=2, evaluations=told(0, under_way=1, announced=1)) as running:
        await running.give(*(f"{n}.1" for n in range(2 * BATCH)))
        await until(lambda: running.waits_for == "evaluation")
        assert best_in(running.directory) == BestVersion(0)
        running.told.say(told(0, under_way=2, announced=2))
        running.told.say(told(2, announced=2))
        await ended(running)
        assert running.shown("best_version") == 2
    assert best_in(running.directory) == BestVersion(2)
    async with start() as again:
        assert again.loop.version == 2


async def test_an_evaluation_that_nobody_answers_keeps_no_finished_learner(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator, "LAST_EVALUATION_LIMIT_S", 0.1)
    async with start(max_versions=1, evaluations=told(under_way=1, announced=1)) as running:
        await running.train(0)
        await ended(running)
    [warned] = [record for record in caplog.records if "an evaluation has not ended" in record.message]
    assert warned.__dict__["version"] == 1
