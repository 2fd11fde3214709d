import asyncio

import pytest

from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from sampler.rollouts.group_submitter import SUBMISSIONS_IN_FLIGHT, GroupSubmitter


class Hub:
    """Answers submissions as scripted, then with SPOOLED; remembers what it was sent."""

    def __init__(self, *script: Exception | Verdict) -> None:
        self.script = list(script)
        self.submitted: list[EncodedGroup] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.is_full = asyncio.Event()
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def submit(self, group: EncodedGroup) -> tuple[Verdict, str]:
        self.submitted.append(group)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight == SUBMISSIONS_IN_FLIGHT:
            self.is_full.set()
        await self.is_open.wait()
        self.in_flight -= 1
        answer = self.script.pop(0) if self.script else Verdict.SPOOLED
        if isinstance(answer, Exception):
            raise answer
        return answer, ""


def encoded(group_id: str) -> EncodedGroup:
    return EncodedGroup(b"header", b"columns", group_id)


def submitter(hub: Hub) -> GroupSubmitter:
    return GroupSubmitter(hub.submit, random=lambda: 0.01)


async def test_a_group_is_handed_in_once_and_its_verdict_told() -> None:
    hub = Hub(Verdict.DUPLICATE)
    assert await submitter(hub).verdict(encoded("1.1")) is Verdict.DUPLICATE
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
async def test_a_submission_is_repeated_with_the_same_bytes_until_the_hub_answers(failure: Exception) -> None:
    hub, group = Hub(failure, failure, failure), encoded("1.1")
    assert await submitter(hub).verdict(group) is Verdict.SPOOLED
    assert [one is group for one in hub.submitted] == [True] * 4


async def test_a_final_refusal_is_no_verdict_and_the_next_goes_on() -> None:
    submitting = submitter(Hub(RefusedError(Reason.OVER_LIMIT, "too large")))
    assert await submitting.verdict(encoded("1.1")) is None
    assert await submitting.verdict(encoded("2.1")) is Verdict.SPOOLED


async def test_so_many_are_on_their_way_at_once_and_the_others_wait() -> None:
    hub = Hub()
    hub.is_open.clear()
    submitting, groups = submitter(hub), SUBMISSIONS_IN_FLIGHT + 3
    async with asyncio.TaskGroup() as tasks:
        verdicts = [tasks.create_task(submitting.verdict(encoded(f"{n}.1"))) for n in range(groups)]
        await hub.is_full.wait()
        hub.is_open.set()
    assert [one.result() for one in verdicts] == [Verdict.SPOOLED] * groups
    assert hub.most_in_flight == SUBMISSIONS_IN_FLIGHT
