import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from node.errors import Reason, RefusedError
from node.rollout import EncodedGroup
from node.rpc.channel import ConnectionLost
from node.verdict import Verdict
from sampler.rollouts.group_submitter import SUBMISSIONS_IN_FLIGHT, GroupSubmitter


class Hub:
    """Answers submissions as scripted, then with SPOOLED; remembers what it was sent."""

    def __init__(self, *script: Exception | Verdict) -> None:
        self.script = list(script)
        self.submitted: list[EncodedGroup] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def submit(self, group: EncodedGroup) -> tuple[Verdict, str]:
        self.submitted.append(group)
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

    def settle(self, group_id: str, verdict: Verdict | None) -> None:
        self.settled.append((group_id, verdict))


def encoded(group_id: str) -> EncodedGroup:
    return EncodedGroup(b"header", b"columns", group_id)


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
        await made.submitter.put(encoded("1.1"))
        await made.submitter.flushed()
    assert made.settled == [("1.1", Verdict.DUPLICATE)]
    assert hub.submitted == [encoded("1.1")]


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
        await made.submitter.put(group := encoded("1.1"))
        await made.submitter.flushed()
    assert [one is group for one in hub.submitted] == [True] * 4  # the same bytes each time
    assert made.settled == [("1.1", Verdict.SPOOLED)]


async def test_a_final_refusal_settles_the_group_and_the_next_goes_on() -> None:
    hub = Hub(RefusedError(Reason.OVER_LIMIT, "too large"))
    async with submitting(hub) as made:
        await made.submitter.put(encoded("1.1"))
        await made.submitter.flushed()
        await made.submitter.put(encoded("2.1"))
        await made.submitter.flushed()
    assert made.settled == [("1.1", None), ("2.1", Verdict.SPOOLED)]


async def test_a_full_queue_makes_put_wait() -> None:
    hub = Hub()
    hub.is_open.clear()
    async with submitting(hub, capacity_groups=2) as made:
        for number in range(SUBMISSIONS_IN_FLIGHT + 2):
            await asyncio.wait_for(made.submitter.put(encoded(f"{number}.1")), timeout=5)
        late = asyncio.create_task(made.submitter.put(encoded("late")))
        done, _ = await asyncio.wait({late}, timeout=0.05)
        assert not done
        hub.is_open.set()
        await late
        await made.submitter.flushed()
    assert len(made.settled) == SUBMISSIONS_IN_FLIGHT + 3
    assert hub.most_in_flight == SUBMISSIONS_IN_FLIGHT
