from dataclasses import replace

import numpy as np
import pytest

from node.values.groups.rollout import PromptLease
from sampler.rollouts.work_queue import NOT_GENERATED, UNBEGUN, JobState, WorkQueue
from support.graded_texts import prompt_of
from support.groups import SAMPLING
from support.present import present

PROMPT = replace(prompt_of(7), token_ids=np.array([1, 2], np.int32))


def lease(lease_id: str) -> PromptLease:
    return PromptLease(lease_id, "addition", 0, 4, SAMPLING, 60.0)


def loaded(*lease_ids: str, concurrency_groups: int = 3, unsubmitted_groups: int = 2) -> WorkQueue:
    work_queue = WorkQueue(concurrency_groups=concurrency_groups, unsubmitted_groups=unsubmitted_groups)
    for lease_id in lease_ids:
        work_queue.take(lease(lease_id), now=7.0)
    return work_queue


def generating(*lease_ids: str) -> WorkQueue:
    work_queue = loaded(*lease_ids)
    for lease_id in lease_ids:
        work_queue.make_ready(lease_id, PROMPT, now=7.0)
        work_queue.begin_next(now=7.0)
    return work_queue


def test_prompts_that_keep_the_sampler_at_a_version_are_generated_first() -> None:
    work_queue = loaded("a", "b", concurrency_groups=2)
    work_queue.take(replace(lease("e3-0.1"), policy_version=3), now=7.0)
    assert (work_queue.is_generating_by(3), work_queue.is_generating_by(4)) == (True, False)
    for lease_id in ("a", "b", "e3-0.1"):
        work_queue.make_ready(lease_id, PROMPT, now=7.0)
    begun = [work_queue.begin_next(now=7.0), work_queue.begin_next(now=7.0)]
    assert [job.lease.lease_id for job in begun if job is not None] == ["e3-0.1", "a"]
    work_queue.finish("e3-0.1", now=8.0)
    assert not work_queue.is_generating_by(3)


@pytest.mark.parametrize(
    ("states", "room", "backlog"),
    [
        ("", 3, None),
        ("pp", 1, None),
        ("prg", 0, None),
        ("Ggg", 1, None),
        ("SSSSS", 0, JobState.SUBMITTING),
        ("SSSS", 1, None),
        ("GGSSS", 0, JobState.SUBMITTING),
        ("GGGSS", 0, JobState.GRADING),
        ("GGGS", 1, None),
        ("ggggg", 0, None),
        ("gggGG", 0, None),
        ("ggGGG", 0, JobState.GRADING),
    ],
)
def test_finished_groups_make_room_until_too_many_wait_and_leave_the_engine_without_work(
    states: str, room: int, backlog: JobState | None
) -> None:
    """Three generate at once, and two more may wait.

    p: prompting, r: ready, g: generating, G: grading, S: submitting.
    """
    work_queue = loaded(*map(str, range(len(states))))
    letters = dict(zip("prgGS", JobState, strict=True))
    for number, letter in enumerate(states):
        work_queue.advance(str(number), letters[letter])
    assert (work_queue.room(), work_queue.backlog()) == (room, backlog)


def test_a_smaller_number_drops_nothing_and_a_larger_one_makes_room_at_once() -> None:
    work_queue = generating("a", "b", "c")
    work_queue.take(lease("d"), now=7.0)
    work_queue.make_ready("d", PROMPT, now=7.0)
    work_queue.concurrency_groups = 1
    assert (work_queue.count(JobState.GENERATING), work_queue.room()) == (3, 0)
    for lease_id in "ab":
        work_queue.finish(lease_id, now=8.0)
    assert work_queue.begin_next(now=8.0) is None
    work_queue.concurrency_groups = 4
    assert work_queue.begin_next(now=8.0) is not None
    assert work_queue.room() == 2


def test_every_lease_is_renewed_until_its_group_is_handed_in() -> None:
    work_queue = loaded("a", "b")
    work_queue.advance("a", JobState.SUBMITTING)
    assert list(work_queue.lease_ids) == ["a", "b"]
    assert len(work_queue) == 2
    assert work_queue.settle("a") is not None
    assert list(work_queue.lease_ids) == ["b"]
    assert work_queue.settle("a") is None


def test_lost_leases_drop_what_is_not_finished_and_nothing_that_is() -> None:
    work_queue = generating("a", "b", "c")
    work_queue.take(lease("d"), now=7.0)
    work_queue.finish("b", now=8.0)
    assert work_queue.drop(NOT_GENERATED, ["a", "b", "d", "unknown"]) == ("a", "d")
    assert work_queue.lease_ids == ("b", "c")
    assert work_queue.finish("a", now=8.0) is None


def test_jobs_not_begun_outlive_a_doubtful_policy() -> None:
    work_queue = generating("a", "b")
    work_queue.take(lease("c"), now=7.0)
    work_queue.advance("b", JobState.SUBMITTING)
    assert work_queue.drop({JobState.GENERATING}) == ("a",)
    assert work_queue.lease_ids == ("b", "c")


def test_ready_prompts_begin_in_order_as_far_as_there_are_places() -> None:
    work_queue = loaded("a", "b", "c", "d", concurrency_groups=2)
    for lease_id in "bac":
        work_queue.make_ready(lease_id, PROMPT, now=8.0)
    begun = [work_queue.begin_next(now=9.0) for _ in range(3)]
    assert [job.lease.lease_id if job else None for job in begun] == ["a", "b", None]
    assert work_queue.count(*UNBEGUN) == 2
    job = present(work_queue.finish("a", now=11.0))
    assert (job.lease.lease_id, job.at_s, job.prompt, job.state) == ("a", 9.0, PROMPT, JobState.GRADING)
    assert present(work_queue.begin_next(now=11.0)).lease.lease_id == "c"


def test_a_prompt_that_comes_after_its_lease_was_lost_is_passed_over() -> None:
    work_queue = loaded("a")
    work_queue.drop(NOT_GENERATED, ["a"])
    work_queue.make_ready("a", PROMPT, now=8.0)
    assert work_queue.begin_next(now=8.0) is None


@pytest.mark.parametrize(("prompt_s", "room"), [(0.01, 3), (0.5, 4), (2.0, 6), (100.0, 6)])
def test_slow_prompts_are_fetched_ahead_and_fast_ones_are_not(prompt_s: float, room: int) -> None:
    """Three groups of 2 s each: a place falls free every 0.67 s."""
    work_queue = loaded("a")
    work_queue.make_ready("a", PROMPT, now=7.0 + prompt_s)
    work_queue.begin_next(now=200.0)
    work_queue.finish("a", now=202.0)
    work_queue.settle("a")
    assert work_queue.room() == room
