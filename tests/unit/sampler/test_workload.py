import numpy as np
import pytest

from node.rollout import PromptLease
from sampler.rollouts.work_queue import UNBEGUN, UNFINISHED, Prompt, Stage, Workload
from sampler.tasks.grader_pool import TaskPrompt
from support.groups import SAMPLING

PROMPT = Prompt(TaskPrompt("7=", 0, 1), np.array([1, 2], np.int32))


def lease(lease_id: str) -> PromptLease:
    return PromptLease(lease_id, "addition", 0, 4, SAMPLING, 60.0)


def loaded(*lease_ids: str, concurrency_groups: int = 3, outbox_groups: int = 2) -> Workload:
    workload = Workload(concurrency_groups=concurrency_groups, outbox_groups=outbox_groups)
    for lease_id in lease_ids:
        workload.take(lease(lease_id), now=7.0)
    return workload


def generating(*lease_ids: str) -> Workload:
    workload = loaded(*lease_ids)
    for lease_id in lease_ids:
        workload.make_ready(lease_id, PROMPT, now=7.0)
        workload.begin_next(now=7.0)
    return workload


def test_room_is_what_can_be_generated_at_once() -> None:
    assert loaded().room() == 3
    assert loaded("a", "b").room() == 1
    assert loaded("a", "b", "c").room() == 0


def test_a_finished_group_makes_room_although_it_is_not_handed_in() -> None:
    workload = loaded("a", "b", "c")
    workload.advance("a", Stage.GRADING)
    assert workload.room() == 1


def test_a_full_outbox_stops_leasing_however_idle_the_engine() -> None:
    workload = loaded("a", "b", "c", "d", "e")
    for lease_id in "abcde":
        workload.advance(lease_id, Stage.OUTBOX)
    assert workload.count(Stage.GENERATING) == 0
    assert workload.room() == 0
    workload.settle("a")
    assert workload.room() == 1


def test_every_lease_is_renewed_until_its_group_is_handed_in() -> None:
    workload = loaded("a", "b")
    workload.advance("a", Stage.OUTBOX)
    assert list(workload.lease_ids) == ["a", "b"]
    workload.settle("a")
    assert list(workload.lease_ids) == ["b"]


def test_lost_leases_drop_what_is_not_finished_and_nothing_that_is() -> None:
    workload = generating("a", "b", "c")
    workload.take(lease("d"), now=7.0)
    workload.finish("b", now=8.0)
    assert workload.drop(UNFINISHED, ["a", "b", "d", "unknown"]) == ("a", "d")
    assert workload.lease_ids == ("b", "c")
    assert workload.finish("a", now=8.0) is None


def test_what_is_not_begun_outlives_a_doubtful_policy() -> None:
    workload = generating("a", "b")
    workload.take(lease("c"), now=7.0)
    workload.advance("b", Stage.OUTBOX)
    assert workload.drop({Stage.GENERATING}) == ("a",)
    assert workload.lease_ids == ("b", "c")


def test_ready_prompts_begin_in_order_as_far_as_there_are_places() -> None:
    workload = loaded("a", "b", "c", "d", concurrency_groups=2)
    for lease_id in "bac":
        workload.make_ready(lease_id, PROMPT, now=8.0)
    begun = [workload.begin_next(now=9.0) for _ in range(3)]
    assert [job.lease.lease_id if job else None for job in begun] == ["a", "b", None]
    assert workload.count(*UNBEGUN) == 2
    job = workload.finish("a", now=11.0)
    assert job is not None
    assert (job.lease.lease_id, job.at_s, job.prompt, job.stage) == ("a", 9.0, PROMPT, Stage.GRADING)
    after = workload.begin_next(now=11.0)
    assert after is not None
    assert after.lease.lease_id == "c"


def test_a_prompt_that_comes_after_its_lease_was_lost_is_passed_over() -> None:
    workload = loaded("a")
    workload.drop(UNFINISHED, ["a"])
    workload.make_ready("a", PROMPT, now=8.0)
    assert workload.begin_next(now=8.0) is None


@pytest.mark.parametrize(("prompt_s", "room"), [(0.01, 3), (0.5, 4), (2.0, 6), (100.0, 6)])
def test_slow_prompts_are_fetched_ahead_and_fast_ones_are_not(prompt_s: float, room: int) -> None:
    """Three groups of 2 s each: a place falls free every 0.67 s."""
    workload = loaded("a")
    workload.make_ready("a", PROMPT, now=7.0 + prompt_s)
    workload.begin_next(now=0.0)
    workload.finish("a", now=2.0)
    workload.settle("a")
    assert workload.room() == room
