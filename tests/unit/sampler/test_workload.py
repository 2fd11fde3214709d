from node.rollout import PromptLease
from sampler.workload import Stage, Workload
from support.groups import SAMPLING


def lease(lease_id: str) -> PromptLease:
    return PromptLease(lease_id, "addition", 0, 4, SAMPLING, 60.0)


def loaded(*lease_ids: str, concurrency_groups: int = 3, outbox_groups: int = 2) -> Workload:
    workload = Workload(concurrency_groups=concurrency_groups, outbox_groups=outbox_groups)
    for lease_id in lease_ids:
        workload.take(lease(lease_id), now=7.0)
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


def test_lost_leases_drop_what_is_generating_and_nothing_that_is_finished() -> None:
    workload = loaded("a", "b", "c")
    workload.advance("b", Stage.GRADING)
    assert workload.drop_generating(["a", "b", "unknown"]) == ("a",)
    assert workload.lease_ids == ("b", "c")
    assert workload.advance("a", Stage.GRADING) is None


def test_everything_generating_can_be_dropped() -> None:
    workload = loaded("a", "b", "c")
    workload.advance("b", Stage.OUTBOX)
    assert workload.drop_generating() == ("a", "c")
    assert workload.lease_ids == ("b",)


def test_a_job_remembers_its_lease_and_when_it_was_taken() -> None:
    job = loaded("a").advance("a", Stage.GRADING)
    assert job is not None
    assert (job.lease.lease_id, job.started_at_s, job.stage) == ("a", 7.0, Stage.GRADING)
