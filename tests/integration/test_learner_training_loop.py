"""The training loop against a hub over a real socket: what is judged, trained on, recorded, repeated."""

import asyncio
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from learner.export import best_in
from learner.intake import copies
from learner.journal import checkpoint
from learner.journal.checkpoint_index import versions_in
from learner.journal.progress import BestVersion, Progress
from learner.masters.master_access import MasterAccess
from learner.objective.entropy_switch import EntropySwitch
from learner.objective.slow_fast import slow_fast_step
from learner.training import coordinator, group_intake
from learner.training.training_state import TrainingError
from node.clients import rollout_drain
from node.errors import StartupError
from node.values.evaluation import EvaluationNotice
from node.values.policy import PolicyVersion
from node.values.rollout import Completion, EncodedGroup, RolloutGroup
from node.values.verdict import Verdict
from node.wire import rollouts
from support.groups import SAMPLING, make_completion
from support.scripted_hub import scripted_hub
from support.training_loop import BATCH, RUN, RunningLearner, learner
from support.waiting import until


async def test_groups_become_steps_and_every_consumer_is_told(model_dir: Path, tmp_path: Path) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await hub.give(*(running.delivered(f"{n}.1") for n in range(4)))
        await hub.wait_until(lambda: len(hub.records) == 2)
        assert hub.trained_group_ids == ["0.1", "1.1", "2.1", "3.1"]
        assert [record.staleness_versions for record in hub.records] == [(0, 0), (1, 1)]
        await hub.wait_until(lambda: all(hub.verdicts_of(f"{n}.1") == [Verdict.ACCEPTED] for n in range(4)))
        assert running.access.take() == running.loop.version == 2
        running.access.release()
        assert running.report is not None
        assert running.report.reward_mean == 0.5
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2]
    assert running.written == [(1, BATCH), (2, BATCH)]
    assert lines[1]["groups"][0] == {"group_id": "2.1", "sampler_id": "sampler-a", "staleness_versions": 1}


async def test_no_step_writes_the_masters_while_a_version_is_read_from_them(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await hub.give(*(running.delivered(f"{n}.1") for n in range(2)))
        await hub.wait_until(lambda: len(hub.records) == 1)
        assert running.access.take() == 1
        before = np.empty(running.policy.layout.words, np.uint16)
        running.policy.snapshot(before)
        with waiting_in(running.access) as waits:
            await hub.give(*(running.delivered(f"{n}.1") for n in range(2, 4)))
            await asyncio.wait_for(asyncio.to_thread(waits.wait), timeout=30)
        during = np.empty_like(before)
        running.policy.snapshot(during)
        assert (during == before).all()
        assert running.loop.version == 1
        running.access.release()
        await hub.wait_until(lambda: len(hub.records) == 2)
        after = np.empty_like(before)
        running.policy.snapshot(after)
        assert (after != before).any()


def equal_rewards(reward: float, *, version: int) -> tuple[Completion, ...]:
    return tuple(make_completion(3 + n, version=version, reward=reward) for n in range(2))


async def test_a_batch_that_teaches_nothing_is_consumed_without_a_step_a_version_or_a_checkpoint(
    model_dir: Path, tmp_path: Path
) -> None:
    """Its groups are consumed once; a batch of which one group teaches is trained on as before."""
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        before = {name: tensor.detach().clone() for name, tensor in running.policy.tensors.items()}
        for number in range(4):
            await hub.give(running.delivered(f"{number}.1", completions=equal_rewards(0.0, version=0)))
        names = [f"{number}.1" for number in range(4)]
        await hub.wait_until(lambda: all(Verdict.UNINFORMATIVE in hub.verdicts_of(name) for name in names))
        assert hub.records == []
        assert running.loop.version == 0
        assert versions_in(tmp_path / "checkpoints") == []
        assert running.access.take() is None
        assert all(torch.equal(tensor, before[name]) for name, tensor in running.policy.tensors.items())
        assert running.drain.unacknowledged == ()
        assert running.shown("uninformative_batches_total") == 2
        assert running.shown("uninformative_ratio") == 1
        assert running.shown("reward_mean") == 0
        assert running.evidence.teaching is not None
        assert (running.evidence.teaching.groups, running.evidence.teaching.uninformative_groups) == (4, 4)
        assert running.evidence.teaching.idle_s > 0
        assert running.written == [(0, BATCH)]  # the first of them, for `heterorl-node samples`
        await hub.give(
            running.delivered("4.1", completions=equal_rewards(0.0, version=0)), running.delivered("5.1")
        )
        await hub.wait_until(lambda: len(hub.records) == 1)
        assert hub.records[0].staleness_versions == (0, 0)
        assert hub.trained_group_ids == ["4.1", "5.1"]
        await until(lambda: running.shown("uninformative_ratio") == pytest.approx(5 / 6))
        assert running.evidence.teaching.idle_s == 0
    [line] = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert (line["version"], line["teaching_groups"]) == (1, 1)


async def test_rewards_of_batches_that_teach_nothing_count_for_the_goal_and_for_the_best_version(
    model_dir: Path, tmp_path: Path
) -> None:
    """A task that is solved teaches nothing any more: the run must end, and the export must know."""
    async with scripted_hub() as hub:
        goal: dict[str, Any] = {"stop_at_reward": 1.0, "stop_window_versions": 2}
        async with learner(hub, model_dir, tmp_path, **goal) as running:
            await hub.give(*(running.delivered(f"{n}.1") for n in range(BATCH)))
            await until(lambda: running.loop.version == 1)
            running.published.append(PolicyVersion(1))
            solved = (
                running.delivered(f"{n}.1", completions=equal_rewards(1.0, version=1)) for n in range(2, 6)
            )
            await hub.give(*solved)
            await asyncio.wait_for(running.tasks[1], timeout=30)
            assert running.loop.version == 1
    assert best_in(tmp_path) == BestVersion(1, 1.0)


async def test_a_step_s_line_says_where_its_time_went(model_dir: Path, tmp_path: Path) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await hub.give(*(running.delivered(f"{n}.1") for n in range(BATCH)))
        await until(lambda: bool(running.written))
    [line] = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert line["journal_s"] > 0
    assert line["groups_wait_s"] > 0
    assert line["masters_wait_s"] >= 0
    assert (line["published_version"], line["publish_s"]) == (7, 0.25)


@contextmanager
def waiting_in(access: MasterAccess) -> Iterator[threading.Event]:
    """Return an event that is set when the optimizer comes to write the masters."""
    came, begin_writing = threading.Event(), access.begin_writing

    def watched() -> float:
        came.set()
        return begin_writing()

    with mock.patch.object(access, "begin_writing", watched):
        yield came


async def test_refused_groups_are_said_why_and_leave_room_for_others(model_dir: Path, tmp_path: Path) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, buffer_groups=2) as running:
        lying = (make_completion(3, behaviour_logprob=np.full(3, -99.0, np.float32)), make_completion(3))
        await hub.give(
            running.delivered("0.1", run_id="another"),
            running.delivered("1.1", completions=lying),
            running.delivered("2.1", sampling=replace(SAMPLING, top_k=20)),
            running.delivered("3.1", version=1),
            running.delivered("6.1", source=EncodedGroup(b"header", b"columns", "6.1")),
            running.delivered("4.1"),
            running.delivered("5.1"),
        )
        await hub.wait_until(lambda: len(hub.records) == 1)
        assert hub.trained_group_ids == ["4.1", "5.1"]
        refused = {name: verdict for name, verdict in hub.verdicts if verdict is not Verdict.ACCEPTED}
        assert refused == {
            "0.1": Verdict.FOREIGN,
            "1.1": Verdict.SUSPECT,
            "2.1": Verdict.FOREIGN,
            "3.1": Verdict.FOREIGN,
            "6.1": Verdict.MALFORMED,
        }
        counted = {
            one: running.shown("groups_total", verdict=one) for one in ("malformed", "foreign", "suspect")
        }
        assert counted == {"malformed": 1, "foreign": 3, "suspect": 1}
        assert running.shown("buffered_groups") == 0


async def test_groups_are_read_in_the_training_thread_and_those_of_a_quarantined_sampler_not_at_all(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop a large one would hold heartbeats up."""
    read: dict[str, str] = {}

    def group_from_wire(encoded: EncodedGroup) -> RolloutGroup:
        read[encoded.group_id] = threading.current_thread().name
        return rollouts.group_from_wire(encoded)

    monkeypatch.setattr(group_intake, "group_from_wire", group_from_wire)
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        running.drain.quarantine("liar", "its rewards are not its grader's")
        await hub.give(running.delivered("0.1"), running.delivered("1.1"))
        await hub.wait_until(lambda: len(hub.records) == 1)
        await hub.give(running.delivered("2.1", sampler_id="liar"))
        await hub.wait_until(lambda: hub.verdicts_of("2.1") == [Verdict.SUSPECT])
    assert [*read] == ["0.1", "1.1"]
    assert {thread.partition("_")[0] for thread in read.values()} == {"training"}


async def test_a_sampler_whose_fresh_logprobs_are_not_the_learners_is_no_longer_believed(
    model_dir: Path, tmp_path: Path
) -> None:
    """Every token is claimed to be likely, -0.5 nats, from the version the learner holds."""
    async with (
        scripted_hub() as hub,
        learner(hub, model_dir, tmp_path, quarantine_mismatch_nats=0.2) as running,
    ):
        await hub.give(*(running.delivered(f"0{n}.1", version=0) for n in range(2)))
        await hub.wait_until(lambda: len(hub.records) == 1)
        await hub.give(*(running.delivered(f"1{n}.1", version=1) for n in range(2)))
        await hub.wait_until(lambda: len(hub.records) == 2)
        await hub.give(running.delivered("9.1", version=2))
        await hub.wait_until(lambda: hub.verdicts_of("9.1") == [Verdict.SUSPECT])
        assert "nats a token further from the learner" in hub.quarantined["sampler-a"]


async def test_a_learner_is_told_of_a_quarantine_at_its_start_and_tells_of_one_again_after_a_cut(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await hub.wait_until(lambda: len(hub.hellos) == 1)
        hub.quarantined = {"sampler-a": "off before this learner started"}
        await hub.cut()
        await hub.wait_until(lambda: len(hub.hellos) >= 2)
        await until(lambda: "sampler-a" in running.drain.quarantined)
        await hub.give(running.delivered("0.1"), running.delivered("1.1", sampler_id="sampler-b"))
        await hub.wait_until(lambda: hub.verdicts_of("0.1") == [Verdict.SUSPECT])
        await hub.wait_until(lambda: hub.verdicts_of("1.1") == [Verdict.ACCEPTED])
        running.drain.quarantine("sampler-b", "off")
        await hub.wait_until(lambda: hub.quarantined.get("sampler-b") == "off")
        hub.quarantined.clear()
        await hub.cut()
        await hub.wait_until(lambda: hub.quarantined.get("sampler-b") == "off")


async def test_groups_that_wait_are_given_up_once_their_sampler_is_quarantined(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await hub.give(running.delivered("0.1", sampler_id="liar"))
        await hub.wait_until(lambda: hub.verdicts_of("0.1") == [Verdict.ACCEPTED])
        running.drain.quarantine("liar", "its rewards are not its grader's")
        await hub.give(*(running.delivered(f"{n}.1") for n in (1, 2)))
        await hub.wait_until(lambda: len(hub.records) == 1)
        assert hub.trained_group_ids == ["1.1", "2.1"]
        assert hub.verdicts_of("0.1") == [Verdict.ACCEPTED, Verdict.SUSPECT]


async def test_whoever_hands_in_copies_trains_nothing_and_is_quarantined(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEAST_NATS", 0.1)  # a test's completions are short, and all the same
    prompt = np.array([1, 2, 3], np.int32)
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await hub.give(running.delivered("0.1", prompt_token_ids=prompt))
        await hub.wait_until(lambda: hub.verdicts_of("0.1") == [Verdict.ACCEPTED])
        names = [f"{n}.1" for n in range(1, copies.COPIES + 1)]
        copied = (running.delivered(one, sampler_id="copier", prompt_token_ids=prompt) for one in names)
        await hub.give(*copied)
        await hub.wait_until(lambda: all(hub.verdicts_of(name) == [Verdict.SUSPECT] for name in names))
        await hub.wait_until(
            lambda: "of group 0.1, which sampler-a drew" in hub.quarantined.get("copier", "")
        )
        assert "sampler-a" not in hub.quarantined
        assert hub.records == []


async def test_a_sampler_whose_groups_are_all_stale_is_measured_or_said_not_to_be(
    model_dir: Path, tmp_path: Path
) -> None:
    """Far has company at its age from the third step on; nobody knows before whether it is the drift."""
    async with (
        scripted_hub() as hub,
        learner(hub, model_dir, tmp_path, quarantine_mismatch_nats=0.2) as running,
    ):
        await hub.give(*(running.delivered(f"0{n}.1", sampler_id="near") for n in range(2)))
        await hub.wait_until(lambda: len(hub.records) == 1)
        await hub.give(*(running.delivered(f"1{n}.1", sampler_id="far") for n in range(2)))
        await hub.wait_until(lambda: len(hub.records) == 2)
        await until(lambda: running.shown("sampler_measured_groups", sampler="far") == 2)
        assert (running.shown("sampler_mismatch_error_nats", sampler="far") or 0.0) > 1.0
        assert running.shown("unmeasured_samplers") == 1
        alone_nats = running.shown("sampler_mismatch_error_nats", sampler="far") or 0.0
        for number, sampler in ((2, "company"), (3, "far")):
            groups = (
                running.delivered(f"{number}{n}.1", version=number - 1, sampler_id=sampler) for n in range(2)
            )
            await hub.give(*groups)
            await until(lambda: running.loop.version > number)  # noqa: B023 - awaited at once
        await until(lambda: (running.shown("sampler_measured_groups", sampler="far") or 0) > 3.9)
        assert (running.shown("sampler_mismatch_error_nats", sampler="far") or 0.0) < alone_nats / 5
        assert {verdict for _, verdict in hub.verdicts} == {Verdict.ACCEPTED}


async def test_divergence_by_age_is_shown_and_a_staleness_bound_recommended_once_two_ages_are_known(
    model_dir: Path, tmp_path: Path
) -> None:
    run = replace(RUN, batch_groups=8)
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, run=run) as running:
        for version in range(2):
            assert math.isnan(running.shown("recommended_staleness_versions") or 0.0)
            await hub.give(*(running.delivered(f"{version}{n}.1") for n in range(8)))
            await until(lambda: running.loop.version > version)  # noqa: B023 - awaited at once
        await until(lambda: not math.isnan(running.shown("recommended_staleness_versions") or 0.0))
        assert (running.shown("drift_nats", age_versions="1") or 0.0) > 0
        assert (running.shown("drift_error_nats", age_versions="1") or 0.0) > 0
        assert math.isnan(running.shown("drift_nats", age_versions="64") or 0.0)
        assert math.isnan(running.shown("expected_ess_ratio", age_versions="64") or 0.0)
        bound = running.shown("recommended_staleness_versions")
        assert 0 < (running.shown("expected_ess_ratio", age_versions="1") or 0.0) < 1
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    first, second = (line["recommended_staleness"] for line in lines)
    assert first["versions"] is None
    assert "about 0 versions old" in first["unknown_because"]
    assert second == {"versions": bound, "sample": "token weights", "unknown_because": ""}


async def test_a_buffered_group_that_grows_stale_is_given_up(model_dir: Path, tmp_path: Path) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        # Each step leaves one group over; the oldest go first, so "old" is made to wait by arriving last.
        await hub.give(*(running.delivered(f"{n}.1") for n in range(5)))
        await hub.wait_until(lambda: len(hub.records) == 2)
        await hub.give(running.delivered("5.1", version=2), running.delivered("6.1", version=2))
        await hub.wait_until(lambda: len(hub.records) == 3)
        assert hub.verdicts_of("4.1") == [Verdict.ACCEPTED, Verdict.STALE]
        assert hub.trained_group_ids[4:] == ["5.1", "6.1"]


async def test_a_restarted_learner_goes_on_where_its_checkpoint_stands(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub:
        hub.is_acknowledging = False
        async with learner(hub, model_dir, tmp_path) as first:
            await hub.give(*(first.delivered(f"{n}.1") for n in range(5)))
            await hub.wait_until(lambda: len(hub.records) == 2)
            first.tasks[0].cancel()
        hub.records.clear()  # the hub lost what it had not acknowledged
        hub.is_acknowledging = True
        async with learner(hub, model_dir, tmp_path) as second:
            assert second.loop.version == 2
            await hub.give(second.delivered("5.1", version=2), second.delivered("6.1", version=2))
            await hub.wait_until(lambda: len(hub.records) == 3)
        assert hub.hellos[-1].version == 2
        assert [record.version for record in hub.records] == [1, 2, 3]
        assert Counter(hub.trained_group_ids) == Counter(["0.1", "1.1", "2.1", "3.1", "5.1", "6.1"])
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2, 3]


async def test_a_group_trained_on_before_is_a_duplicate_after_a_restart(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub:
        async with learner(hub, model_dir, tmp_path) as first:
            groups = [first.delivered(f"{n}.1") for n in range(BATCH)]
            await hub.give(*groups)
            await hub.wait_until(lambda: len(hub.records) == 1)
        # Acknowledged, so that only the checkpoint's memory of trained groups can tell.
        assert first.drain.unacknowledged == ()
        async with learner(hub, model_dir, tmp_path) as second:
            await hub.wait_until(lambda: len(hub.hellos) == 2)
            await hub.give(*groups)
            await hub.wait_until(lambda: hub.verdicts_of("1.1")[-1] is Verdict.DUPLICATE)
            assert second.registry.get_sample_value("heterorl_learner_doubled_groups_total") == len(groups)
        assert Counter(hub.trained_group_ids) == Counter(["0.1", "1.1"])


async def test_a_lost_stream_is_counted_and_begun_again(model_dir: Path, tmp_path: Path) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        await hub.wait_until(lambda: len(hub.hellos) == 1)
        await hub.cut()
        await hub.wait_until(lambda: len(hub.hellos) == 2)
        assert running.registry.get_sample_value("heterorl_learner_lost_drain_streams_total") == 1


async def test_the_loop_ends_by_itself_at_the_last_version(model_dir: Path, tmp_path: Path) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, max_versions=2) as running:
        await hub.give(*(running.delivered(f"{n}.1") for n in range(6)))
        await asyncio.wait_for(running.tasks[1], timeout=30)
        assert running.loop.version == 2


async def test_a_finished_loop_waits_for_the_acknowledgement_of_its_last_step(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, max_versions=1) as running:
        hub.is_acknowledging = False
        await hub.give(*(running.delivered(f"{n}.1") for n in range(BATCH)))
        await hub.wait_until(lambda: len(hub.records) == 1)
        await until(lambda: running.waits_for == "step acknowledgement")
        hub.is_acknowledging = True
        await hub.cut()
        await asyncio.wait_for(running.tasks[1], timeout=30)
        assert running.drain.unacknowledged == ()


async def test_a_stopped_learner_whose_coordinator_is_gone_leaves_within_a_limit_and_sends_its_records_later(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout_drain, "LAST_RECORDS_LIMIT_S", 0.2)
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        hub.is_acknowledging = False
        await hub.give(*(running.delivered(f"{n}.1") for n in range(BATCH)))
        await hub.wait_until(lambda: len(hub.records) == 1)
        await hub.close()
        running.stopping.set()
        await asyncio.wait_for(asyncio.gather(*running.tasks), timeout=5)
    [warned] = [record for record in caplog.records if "has not acknowledged" in record.message]
    assert warned.__dict__["versions"] == [1]
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path):
        await hub.wait_until(lambda: [step.version for step in hub.records] == [1])


async def test_an_evaluation_that_ends_after_the_last_step_is_known_to_the_export(
    model_dir: Path, tmp_path: Path
) -> None:
    before = EvaluationNotice(best=0, under_way=1, announced=1, is_evaluated=True)
    async with (
        scripted_hub() as hub,
        learner(hub, model_dir, tmp_path, max_versions=2, evaluations=before) as running,
    ):
        await hub.give(*(running.delivered(f"{n}.1") for n in range(2 * BATCH)))
        await until(lambda: running.waits_for == "evaluation")
        assert best_in(tmp_path) == BestVersion(0)
        running.told.say(EvaluationNotice(best=0, under_way=2, announced=2, is_evaluated=True))
        running.told.say(EvaluationNotice(best=2, announced=2, is_evaluated=True))
        await asyncio.wait_for(running.tasks[1], timeout=30)
        assert running.shown("best_version") == 2
    assert best_in(tmp_path) == BestVersion(2)
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as again:
        assert again.loop.version == 2


async def test_an_evaluation_that_nobody_answers_keeps_no_finished_learner(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator, "LAST_EVALUATION_LIMIT_S", 0.1)
    stuck = EvaluationNotice(under_way=1, announced=1, is_evaluated=True)
    async with (
        scripted_hub() as hub,
        learner(hub, model_dir, tmp_path, max_versions=1, evaluations=stuck) as running,
    ):
        await hub.give(*(running.delivered(f"{n}.1") for n in range(BATCH)))
        await asyncio.wait_for(running.tasks[1], timeout=30)
    [warned] = [record for record in caplog.records if "an evaluation has not ended" in record.message]
    assert warned.__dict__["version"] == 1


async def test_the_best_version_is_that_of_the_best_window_until_versions_are_evaluated(
    model_dir: Path, tmp_path: Path
) -> None:
    """Batches of 0.75, 0.5, 0.75 and 0.5 by windows of two: 0.625 is reached first, and not exceeded."""

    async def train(running: RunningLearner, version: int, reward: float) -> None:
        completions = with_rewards(reward, version=version)
        groups = (running.delivered(f"{version}{n}.1", completions=completions) for n in range(BATCH))
        await hub.give(*groups)
        await until(lambda: running.loop.version > version)
        running.published.append(PolicyVersion(version + 1))

    async with scripted_hub() as hub:
        async with learner(hub, model_dir, tmp_path, stop_window_versions=2) as running:
            await train(running, 0, 0.75)
            assert best_in(tmp_path) is None
            for version, reward in ((1, 0.5), (2, 0.75), (3, 0.5)):
                await train(running, version, reward)
            # Published when the batch came that made the window the best.
            assert best_in(tmp_path) == BestVersion(1, 0.625)
            await until(lambda: running.shown("best_version") == 1)
        told = EvaluationNotice(best=3, under_way=4, announced=5, is_evaluated=True)
        async with learner(hub, model_dir, tmp_path, evaluations=told, stop_window_versions=2) as running:
            for version in (4, 5):
                await train(running, version, 0.9)
            assert best_in(tmp_path) == BestVersion(3)
        async with learner(hub, model_dir, tmp_path, stop_window_versions=2) as running:
            await train(running, 6, 0.95)
            assert best_in(tmp_path) == BestVersion(3)


async def test_the_best_version_is_written_down_when_it_is_told_and_not_with_the_next_step(
    model_dir: Path, tmp_path: Path
) -> None:
    told = EvaluationNotice(announced=1, is_evaluated=True)
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, evaluations=told) as running:
        await hub.give(*(running.delivered(f"{n}.1") for n in range(BATCH)))
        await until(lambda: running.loop.version == 1)
        assert best_in(tmp_path) is None
        running.told.say(EvaluationNotice(best=1, announced=1, is_evaluated=True))
        await until(lambda: best_in(tmp_path) == BestVersion(1))
        await until(lambda: running.shown("best_version") == 1)
        running.told.say(EvaluationNotice(announced=1, is_evaluated=True))  # those who said so are revoked
        await hub.give(*(running.delivered(f"{n}.1") for n in range(BATCH, 2 * BATCH)))
        await until(lambda: running.loop.version == 2)
        assert best_in(tmp_path) == BestVersion(1)  # until another version has a score


def with_rewards(mean: float, *, version: int) -> tuple[Completion, ...]:
    return tuple(make_completion(3, version=version, reward=mean + sign * 0.25) for sign in (-1, 1))


async def test_the_loop_ends_by_itself_once_the_mean_reward_of_the_window_reaches_the_goal(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two batches of 0.25 and 0.75 make 0.5; the window goes on across a restart."""
    caplog.set_level("INFO")
    async with scripted_hub() as hub:
        goal: dict[str, Any] = {"stop_at_reward": 0.5, "stop_window_versions": 2}
        async with learner(hub, model_dir, tmp_path, **goal) as first:
            for number, reward in enumerate((0.5, 0.25)):
                groups = (
                    first.delivered(f"{number}{n}.1", completions=with_rewards(reward, version=number))
                    for n in range(BATCH)
                )
                await hub.give(*groups)
                await until(lambda: first.loop.version > number)  # noqa: B023 - awaited at once
            assert first.state.completion == ""
        async with learner(hub, model_dir, tmp_path, **goal) as second:
            groups = (
                second.delivered(f"2{n}.1", completions=with_rewards(0.75, version=2)) for n in range(BATCH)
            )
            await hub.give(*groups)
            await asyncio.wait_for(second.tasks[1], timeout=30)
            assert second.loop.version == 3
            assert second.state.completion == "done: mean reward 0.5 over 2 batches, the goal is 0.5"
    [complete] = [record for record in caplog.records if record.message == "training complete"]
    assert (complete.__dict__["version"], complete.__dict__["why"]) == (3, second.state.completion)


async def test_gradients_that_are_never_finite_end_the_learner_with_its_version_intact(
    model_dir: Path, tmp_path: Path
) -> None:
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path) as running:
        running.policy.tensors["model.norm.weight"].data[0] = torch.inf
        await hub.give(*(running.delivered(f"{n}.1") for n in range(6)))
        with pytest.raises(TrainingError, match="3 gradients in a row"):
            await asyncio.wait_for(asyncio.shield(running.tasks[1]), timeout=30)
        assert running.loop.version == 0
        assert running.access.take() is None
        await hub.wait_until(lambda: len(hub.verdicts) == 12)
        counted = Counter(verdict for _, verdict in hub.verdicts)
        assert counted == {Verdict.ACCEPTED: 6, Verdict.SUSPECT: 6}


async def test_a_run_whose_batch_this_learner_cannot_hold_ends_it_at_the_start(
    model_dir: Path, tmp_path: Path
) -> None:
    run = replace(RUN, batch_groups=9)
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path, run=run) as running:
        with pytest.raises(StartupError, match="never fills a batch of 9"):
            await asyncio.wait_for(running.tasks[1], timeout=30)


async def test_fast_steps_end_for_good_when_the_entropy_jumps_and_a_restart_remembers(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """29 entropies of 0 before the first step, which alone has fast steps."""
    calm = EntropySwitch(entropies=(0.0,) * 29)
    monkeypatch.setattr(checkpoint, "Progress", partial(Progress, entropy_switch=calm))
    fast = mock.Mock(wraps=slow_fast_step)
    monkeypatch.setattr("learner.step.train_step.slow_fast_step", fast)
    async with scripted_hub() as hub:
        for start in range(2):
            async with learner(
                hub, model_dir, tmp_path, fast_steps=1, fast_steps_until_deviations=1.0
            ) as running:
                groups = (running.delivered(f"{start}{n}.1", version=start) for n in range(BATCH))
                await hub.give(*groups)
                await until(lambda: running.loop.version > start)  # noqa: B023 - awaited at once
                assert not running.state.progress.entropy_switch.is_on
                assert fast.call_count == 1
