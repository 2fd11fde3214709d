import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from node.clients.rollouts.rollout_client import SamplerRolloutClient
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.rollout import LeaseGrant, PromptLease
from node.values.policy import PolicyVersion
from sampler.engines.engine import EngineUse
from sampler.rollouts import leasing as leasing_module
from sampler.rollouts.concurrency import FIRST_GROUPS
from sampler.rollouts.leasing import FAILURES_IN_A_ROW, TOO_FEW_GROUPS, Leasing
from sampler.rollouts.work_queue import JobState, WorkQueue
from sampler.served_policy import ServedPolicy
from support.groups import SAMPLING
from support.waiting import until

HELD = PolicyVersion(3, b"r" * 16)


class Hub:
    """Grants what the test puts in; remembers what it was asked."""

    def __init__(self, *grants: LeaseGrant | Exception) -> None:
        self.grants = list(grants)
        self.asked: list[int] = []
        self.stays: list[bool] = []
        self.released: list[str] = []
        self.failed: list[FailedLease] = []
        self.release_failures: list[Exception] = []

    async def lease(self, max_leases: int, held: PolicyVersion, *, stays: bool) -> LeaseGrant:
        assert held == HELD
        self.asked.append(max_leases)
        self.stays.append(stays)
        grant = self.grants.pop(0) if self.grants else LeaseGrant((), 3600.0, "staleness")
        if isinstance(grant, Exception):
            raise grant
        return grant

    async def release(self, lease_ids: Sequence[str], failed: Sequence[FailedLease] = ()) -> int:
        if self.release_failures:
            raise self.release_failures.pop(0)
        self.released += lease_ids
        self.failed += failed
        return len(lease_ids) + len(failed)


def grant(*lease_ids: str) -> LeaseGrant:
    return LeaseGrant(tuple(PromptLease(i, "addition", 0, 4, SAMPLING, 60.0) for i in lease_ids), 0.0, "")


class Desk:
    def __init__(
        self, hub: Hub, *, is_serving: bool = True, monotonic: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.hub = hub
        self.work_queue = WorkQueue(concurrency_groups=2, unsubmitted_groups=2)
        self.node_metrics = NodeMetrics(CollectorRegistry(), roles=["sampler"], clock=SystemClock())
        self.policy = ServedPolicy(is_generating=self.work_queue.is_generating_by)
        if is_serving:
            self.policy.answered(HELD.number, LeaseGrant((), 0.0, ""), had_to_ask=False, now=0.0)
            self.policy.hold(HELD, now=0.0)
        self.leasing = Leasing(
            cast(SamplerRolloutClient, hub),
            self.policy,
            work_queue=self.work_queue,
            node_metrics=self.node_metrics,
            random=lambda: 0.01,
            monotonic=monotonic,
        )
        self.unwanted: set[str] = set()
        self.are_graders_late = False

    def stop(self) -> None:
        """Stop at the version held, with nothing left to generate for it."""
        held_out = PromptLease("e3-0.1", "addition", 0, 1, SAMPLING, 60.0, policy_version=HELD.number)
        self.policy.answered(HELD.number, LeaseGrant((held_out,), 0.0, ""), had_to_ask=False, now=0.0)

    def take(self, lease: PromptLease) -> bool:
        if lease.lease_id in self.unwanted:
            self.leasing.give_back([lease.lease_id])
            return False
        self.work_queue.take(lease, now=0.0)
        return True


@asynccontextmanager
async def leasing(desk: Desk) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(desk.leasing.run(desk.take))
        yield
        running.cancel()


async def test_leases_are_taken_up_to_the_room_there_is_and_again_when_there_is_more() -> None:
    desk = Desk(Hub(grant("1.1", "2.1"), grant("3.1")))
    async with leasing(desk):
        await until(lambda: desk.work_queue.room() == 0)
        desk.work_queue.advance("1.1", JobState.GRADING)
        desk.leasing.notice_change()
        await until(lambda: desk.work_queue.lease_ids == ("1.1", "2.1", "3.1"))
    assert desk.hub.asked == [2, 1]


async def test_an_operators_order_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="sampler.rollouts.leasing")
    drained = LeaseGrant((), 0.0, "drained")
    desk = Desk(Hub(grant("1.1"), drained, drained, grant("2.1")))
    async with leasing(desk):
        await until(lambda: desk.work_queue.lease_ids == ("1.1", "2.1"))
    told = [record.getMessage() for record in caplog.records]
    assert told == ["held back by an operator", "leases again"]


async def test_a_sampler_that_stays_for_an_evaluation_stays_through_a_pause() -> None:
    desk = Desk(Hub(LeaseGrant((), 3600.0, "paused")))
    desk.stop()
    async with leasing(desk):
        await until(lambda: desk.hub.asked == [2])
    assert desk.policy.has_to_ask


async def test_at_a_stop_leases_are_asked_for_without_room_until_none_for_evaluation_come() -> None:
    held_out = PromptLease("e3-0.1", "addition", 0, 1, SAMPLING, 60.0, policy_version=HELD.number)
    desk = Desk(Hub(grant("1.1", "2.1"), LeaseGrant((held_out,), 0.0, ""), LeaseGrant((), 0.0, "")))
    async with leasing(desk):
        await until(lambda: desk.work_queue.room() == 0)
        desk.stop()
        await until(lambda: "e3-0.1" in desk.work_queue.lease_ids)
        assert desk.hub.asked == [2, 1]
        desk.work_queue.advance("e3-0.1", JobState.GRADING)
        desk.leasing.notice_change()
        await until(lambda: desk.hub.asked == [2, 1, 1])
        await until(lambda: not desk.policy.stays(now=0.0))
    assert desk.hub.stays == [False, True, True]


async def test_a_stop_ends_the_wait_that_the_hub_asked_for() -> None:
    """The answer before it was about another version: at a stop both fetches and leases wait for the next."""
    desk = Desk(Hub(LeaseGrant((), 3600.0, "policy version"), LeaseGrant((), 3600.0, "policy version")))
    async with leasing(desk):
        await until(lambda: desk.node_metrics.waits_for == "policy version")
        desk.stop()
        await until(lambda: len(desk.hub.asked) == 2)
        assert not desk.policy.stays(now=0.0)


@pytest.mark.parametrize("bound", ["learner", "ledger"])
async def test_a_coordinator_that_has_started_again_ends_no_stop_before_it_knows_its_evaluation(
    bound: str,
) -> None:
    desk = Desk(Hub(LeaseGrant((), 0.0, bound), LeaseGrant((), 0.0, "staleness")))
    desk.stop()
    async with leasing(desk):
        await until(lambda: len(desk.hub.asked) == 1)
        assert desk.policy.stays(now=0.0)
        await until(lambda: not desk.policy.stays(now=0.0))
    assert len(desk.hub.asked) == 2


@pytest.mark.parametrize("grants", [(), (grant("1.1", "2.1"),)], ids=["hub has none", "no room is left"])
async def test_leases_are_given_back_at_once_while_none_are_asked_for(grants: tuple[LeaseGrant, ...]) -> None:
    desk = Desk(Hub(*grants))
    async with leasing(desk):
        await until(lambda: desk.hub.asked == [2])
        desk.leasing.give_back(["9.9"])
        await until(lambda: desk.hub.released == ["9.9"])
    assert desk.hub.asked == [2]


async def test_nothing_is_leased_before_there_is_a_policy_to_sample_from() -> None:
    desk = Desk(Hub(grant("1.1", "2.1")), is_serving=False)
    async with leasing(desk):
        await until(lambda: desk.node_metrics.waits_for == "policy version")
        assert desk.hub.asked == []
        desk.policy.hold(HELD, now=0.0)
        await until(lambda: desk.hub.asked == [2])


@pytest.mark.parametrize(
    ("bound", "shown"), [("staleness", "prompt lease: staleness"), ("x" * 500, "prompt lease")]
)
async def test_the_bound_the_hub_names_is_shown_where_it_is_a_known_one(bound: str, shown: str) -> None:
    desk = Desk(Hub(LeaseGrant((), 3600.0, bound)))
    async with leasing(desk):
        await until(lambda: desk.node_metrics.waits_for == shown)


async def test_a_backlog_of_finished_groups_is_named_until_there_is_room() -> None:
    desk = Desk(Hub(grant("1.1", "2.1"), grant("3.1", "4.1"), grant("5.1")))
    for lease_id in ("6.1", "7.1"):
        desk.work_queue.take(PromptLease(lease_id, "addition", 0, 4, SAMPLING, 60.0), now=0.0)
        desk.work_queue.advance(lease_id, JobState.GRADING)
    async with leasing(desk):
        await until(lambda: desk.work_queue.room() == 0)
        for lease_id in desk.work_queue.lease_ids:
            desk.work_queue.advance(lease_id, JobState.GRADING)
        desk.leasing.notice_change()
        await until(lambda: desk.leasing.held_back_by == "graders")
        assert desk.node_metrics.waits_for == "graders"
        desk.work_queue.settle("6.1")
        desk.leasing.notice_change()
        await until(lambda: desk.leasing.held_back_by != "graders")


@pytest.mark.parametrize("failure", [ConnectionLost("cut"), RefusedError(Reason.NOT_JOINED, "restarted")])
async def test_a_hub_that_is_away_is_asked_again(failure: Exception) -> None:
    desk = Desk(Hub(failure, failure, grant("1.1", "2.1")))
    async with leasing(desk):
        await until(lambda: desk.work_queue.room() == 0)
    assert desk.hub.asked == [2, 2, 2]


async def test_unwanted_leases_go_back_before_more_are_asked_for() -> None:
    desk = Desk(Hub(grant("1.1", "2.1"), grant("3.1")))
    desk.unwanted = {"2.1"}
    async with leasing(desk):
        await until(lambda: desk.work_queue.lease_ids == ("1.1", "3.1"))
    assert desk.hub.released == ["2.1"]


async def test_a_failed_lease_goes_back_with_its_fault_and_is_told_until_the_hub_has_heard_it() -> None:
    desk = Desk(Hub(grant("1.1", "2.1")))
    desk.hub.release_failures = [ConnectionLost("cut"), RefusedError(Reason.BUSY, "later")]
    failed = FailedLease("1.1", Failure.GRADING_FAILED, "ValueError: x")
    async with leasing(desk):
        await until(lambda: desk.work_queue.room() == 0)
        desk.leasing.give_up("1.1", Failure.GRADING_FAILED, "ValueError: x")
        await until(lambda: desk.hub.failed == [failed])
    assert desk.hub.release_failures == []


@pytest.mark.parametrize("fault", [Failure.PROMPT_TOO_LONG, None])
async def test_a_sampler_whose_every_lease_fails_takes_one_at_a_time_after_a_pause(
    fault: Failure | None,
) -> None:
    desk = Desk(Hub())
    for number in range(FAILURES_IN_A_ROW):
        desk.leasing.give_up(f"{number}.1", fault)
    async with leasing(desk):
        await until(lambda: desk.node_metrics.waits_for == "task that works")
        await until(lambda: desk.hub.asked == [1])
    assert len(desk.hub.failed) + len(desk.hub.released) == FAILURES_IN_A_ROW


async def test_one_success_ends_the_pauses() -> None:
    desk = Desk(Hub())
    for number in range(3 * FAILURES_IN_A_ROW):
        if number == 2 * FAILURES_IN_A_ROW + 1:
            desk.leasing.note_success()
        desk.leasing.give_up(f"{number}.1", Failure.PROMPT_FAILED)
    async with leasing(desk):
        await until(lambda: desk.hub.asked == [2])


class Reading:
    """An engine, nearly empty unless more is asked of it, which each look finds a second later."""

    def __init__(self, asked_share: float = 0.1) -> None:
        self.asked_share = asked_share
        self.looks = 0

    def use(self) -> EngineUse:
        self.looks += 1
        return EngineUse(0.05, self.asked_share)


@pytest.fixture(autouse=True)
def reading_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing_module, "READING_S", 0.0)


@asynccontextmanager
async def filling(
    desk: Desk, *, is_set: bool = False, reading: Reading | None = None
) -> AsyncIterator[Reading]:
    """Lease for an engine in which a group takes ten seconds."""
    desk.work_queue.group_s = 10.0
    reading = Reading() if reading is None else reading
    async with leasing(desk), asyncio.TaskGroup() as tasks:
        filling_engine = desk.leasing.fill_engine(
            reading.use, are_graders_late=lambda: desk.are_graders_late, is_set=is_set
        )
        running = tasks.create_task(filling_engine)
        yield reading
        running.cancel()


def grant_of(leases: int, *, after: int = 0) -> LeaseGrant:
    return grant(*(f"{after + number}.1" for number in range(leases)))


async def test_an_empty_engine_is_asked_more_groups_for_as_long_as_the_hub_grants_them() -> None:
    grants = (grant_of(2), grant_of(6, after=2), grant_of(8, after=8), grant_of(16, after=16))
    desk = Desk(Hub(*grants), monotonic=itertools.count().__next__)
    async with filling(desk) as reading:
        await until(lambda: desk.hub.asked == [2, 6, 8, 16, 32])  # and no more: the hub is at its bound
        looks = reading.looks
        await until(lambda: reading.looks > looks + 100)
    assert desk.work_queue.concurrency_groups == 64


@pytest.mark.parametrize(("asked_share", "wait"), [(0.1, TOO_FEW_GROUPS), (1.0, "")])
async def test_a_number_that_is_set_stays_and_is_named_where_the_engine_has_room_for_more(
    asked_share: float, wait: str
) -> None:
    desk = Desk(Hub(grant_of(2)), monotonic=itertools.count().__next__)
    before = desk.work_queue.concurrency_groups
    async with filling(desk, is_set=True, reading=Reading(asked_share)) as reading:
        await until(lambda: desk.hub.asked == [2] and reading.looks > 100)
        await until(lambda: desk.leasing.held_back_by == wait)
    assert desk.work_queue.concurrency_groups == before


@pytest.mark.parametrize(
    "answer", [LeaseGrant((), 3600.0, "staleness"), ConnectionLost("gone")], ids=["at its bound", "away"]
)
async def test_a_sampler_that_its_hub_holds_back_asks_for_no_more(answer: LeaseGrant | Exception) -> None:
    desk = Desk(Hub(answer), monotonic=itertools.count().__next__)
    async with filling(desk) as reading:
        await until(lambda: reading.looks > 100)
    assert desk.work_queue.concurrency_groups == FIRST_GROUPS


async def test_an_engine_without_a_version_is_not_asked_how_full_it_is() -> None:
    desk = Desk(Hub(), is_serving=False)
    async with filling(desk) as reading:
        for _ in range(100):
            await asyncio.sleep(0)
    assert reading.looks == 0


async def test_slow_graders_are_given_no_more_groups() -> None:
    desk = Desk(Hub(grant_of(2), grant_of(6, after=2)), monotonic=itertools.count().__next__)
    desk.are_graders_late = True
    async with filling(desk) as reading:
        await until(lambda: reading.looks > 100)
    assert desk.hub.asked == [2, 6]
