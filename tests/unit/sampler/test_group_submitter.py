import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from node.errors import Reason, RefusedError
from node.rollout import RolloutGroup
from node.rpc.channel import ConnectionLost
from node.verdict import Verdict
from sampler.rollouts.group_submitter import SUBMISSIONS_IN_FLIGHT, GroupSubmitter
from support.groups import make_group


class Hub:
    """Answers submissions as scripted, then with SPOOLED; remembers what it was sent."""

    def __init__(self, *script: Exception | Verdict) -> None:
        self.script = list(script)
        self.submitted: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def submit(self, group: RolloutGroup) -> tuple[Verdict, str]:
        self.submitted.append(group.group_id)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await self.is_open.wait()
        self.in_flight -= 1
        answer = self.script.pop(0) if self.script else Verdict.SPOOLED
        if isinstance(answer, Exception):
            raise answer
        return answer, ""


class Submitting:
    def __init__(self, hub: Hub, capacity_groups: int) -> None:
        self.submitter = GroupSubmitter(hub.submit, capacity_groups=capacity_groups, random=lambda: 0.01)
        self.settled: list[tuple[str, Verdict | None]] = []

    def settle(self, group: RolloutGroup, verdict: Verdict | None) -> None:
        self.settled.append((group.group_id, verdict))


@asynccontextmanager
async def submitting(hub: Hub, *, capacity_groups: int = 8) -> AsyncIterator[Submitting]:
    made = Submitting(hub, capacity_groups)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.submitter.run(made.settle))
        yield made
        running.cancel()


async def test_a_group_is_handed_in_once_and_its_verdict_told() -> None:
    hub = Hub(Verdict.DUPLICATE)
    async with submitting(hub) as made:
        await made.submitter.put(make_group("1.1"))
        await made.submitter.flushed()
    assert made.settled == [("1.1", Verdict.DUPLICATE)]
    assert hub.submitted == ["1.1"]


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionLost("cut"),
        RefusedError(Reason.BUSY, "full"),
        RefusedError(Reason.NOT_JOINED, "restarted"),
        RefusedError(Reason.EXPIRED, "the certificate of s1 expired: a clock may be wrong"),
    ],
)
async def test_a_submission_is_repeated_until_the_hub_answers(failure: Exception) -> None:
    hub = Hub(failure, failure, failure)
    async with submitting(hub) as made:
        await made.submitter.put(make_group("1.1"))
        await made.submitter.flushed()
    assert hub.submitted == ["1.1"] * 4
    assert made.settled == [("1.1", Verdict.SPOOLED)]


async def test_a_final_refusal_settles_the_group_and_the_next_goes_on() -> None:
    hub = Hub(RefusedError(Reason.OVER_LIMIT, "too large"))
    async with submitting(hub) as made:
        await made.submitter.put(make_group("1.1"))
        await made.submitter.flushed()
        await made.submitter.put(make_group("2.1"))
        await made.submitter.flushed()
    assert made.settled == [("1.1", None), ("2.1", Verdict.SPOOLED)]


async def test_a_full_queue_makes_put_wait() -> None:
    hub = Hub()
    hub.is_open.clear()
    async with submitting(hub, capacity_groups=2) as made:
        for number in range(SUBMISSIONS_IN_FLIGHT + 2):
            await asyncio.wait_for(made.submitter.put(make_group(f"{number}.1")), timeout=5)
        late = asyncio.create_task(made.submitter.put(make_group("late")))
        done, _ = await asyncio.wait({late}, timeout=0.05)
        assert not done
        hub.is_open.set()
        await late
        await made.submitter.flushed()
    assert len(made.settled) == SUBMISSIONS_IN_FLIGHT + 3
    assert hub.most_in_flight == SUBMISSIONS_IN_FLIGHT
