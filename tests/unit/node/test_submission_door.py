"""Groups as they come in at a hub: admitted, bounded, answered in order."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from heterorl.v1 import common_pb2, rollout_pb2
from node.coordinator.requests import submission_door
from node.coordinator.requests.submission_door import SubmissionDoor
from node.coordinator.work.decisions.submitted_groups import Submitted
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.limits import GROUPS_PER_REQUEST
from node.values.roles import Role
from node.wire.rollouts import submission_to_wire
from support.refusals import refused
from support.waiting import until

SAMPLER = Peer("example", Role.SAMPLER, "sampler-1")
SPOOLED = common_pb2.VERDICT_SPOOLED

Item = rollout_pb2.SubmitRolloutsRequest | RefusedError


class Hub:
    """A door, what was taken in behind it, and a gate before the disk."""

    def __init__(self, **bounds: Any) -> None:
        self.taken: list[EncodedGroup] = []
        self.refusals: Counter[Reason] = Counter()
        self.read = 0
        self.disk = asyncio.Event()
        self.disk.set()
        self.late: dict[str, asyncio.Event] = {}
        self.registry = CollectorRegistry()

        def count(*, service: str, reason: Reason) -> None:
            assert service == "RolloutService"
            self.refusals[reason] += 1

        self.door = SubmissionDoor(count_refusal=count, metrics=TransferMetrics(self.registry), **bounds)

    async def take(self, group: EncodedGroup) -> Submitted:
        self.taken.append(group)
        await self.late.get(group.group_id, self.disk).wait()
        return Submitted(Verdict.SPOOLED, group.group_id)

    async def requests(self, items: "tuple[Item, ...]") -> AsyncIterator[Item]:
        for item in items:
            self.read += 1
            yield item

    async def answers(
        self, *items: Item, caller: Peer = SAMPLER, group_bytes: int = 100
    ) -> list[rollout_pb2.SubmissionAnswer]:
        found: list[rollout_pb2.SubmissionAnswer] = []
        responses = self.door.answers(self.requests(items), caller, self.take, group_bytes=group_bytes)
        async for response in responses:
            found += response.answers
        return found

    async def reasons(self, *items: Item, **about: Any) -> list[str]:
        return [answer.reason for answer in await self.answers(*items, **about)]

    @property
    def in_flight_bytes(self) -> float | None:
        return self.registry.get_sample_value("heterorl_node_submission_bytes")


def plain(*group_ids: str, size_bytes: int = 5) -> rollout_pb2.SubmitRolloutsRequest:
    return submission_to_wire(*(EncodedGroup(b"", bytes(size_bytes), name) for name in group_ids))


async def test_a_group_counts_for_the_sampler_whose_connection_it_comes_over() -> None:
    here = Hub()
    assert await here.reasons(plain("0.1")) == [""]
    assert here.taken == [EncodedGroup(b"", bytes(5), "0.1", "sampler-1")]
    for named in ("sampler-1", "sampler-2"):
        request = submission_to_wire(EncodedGroup(b"", b"group", "0.1", sampler_id=named))
        assert await here.reasons(request) == [Reason.WRONG_ROLE]
    assert len(here.taken) == 1


async def test_a_refusal_is_one_groups_answer_and_counted_and_the_stream_goes_on() -> None:
    here = Hub()
    unreadable = RefusedError(Reason.MALFORMED, "not a message")
    answers = await here.answers(plain("0.1"), plain("1.1", size_bytes=101), unreadable, plain("2.1"))
    assert [(answer.verdict, answer.reason) for answer in answers] == [
        (SPOOLED, ""),
        (common_pb2.VERDICT_UNSPECIFIED, Reason.OVER_LIMIT),
        (common_pb2.VERDICT_UNSPECIFIED, Reason.MALFORMED),
        (SPOOLED, ""),
    ]
    assert here.refusals == {Reason.OVER_LIMIT: 1, Reason.MALFORMED: 1}


async def test_groups_of_one_request_are_decided_and_answered_each_for_itself() -> None:
    here = Hub()
    several = plain("0.1", "1.1", "2.1", "3.1")
    several.further[0].sampler_id = "sampler-2"
    several.further[1].columns = bytes(101)
    answers = await here.answers(several, plain("4.1"))
    assert [answer.reason or answer.detail for answer in answers] == [
        "0.1",
        Reason.WRONG_ROLE,
        Reason.OVER_LIMIT,
        "3.1",
        "4.1",
    ]
    assert [group.group_id for group in here.taken] == ["0.1", "3.1", "4.1"]


async def test_each_response_says_how_many_groups_a_request_may_have() -> None:
    here = Hub()
    responses = here.door.answers(here.requests((plain("0.1"),)), SAMPLER, here.take, group_bytes=100)
    assert [response.groups_per_request async for response in responses] == [GROUPS_PER_REQUEST]


async def test_groups_of_one_request_wait_for_room_and_places_as_if_they_had_come_singly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission_door, "STREAM_GROUPS", 3)
    here = Hub(in_flight_bytes=100)
    here.disk.clear()
    names = [f"{n}.1" for n in range(GROUPS_PER_REQUEST)]
    answers = asyncio.create_task(here.answers(plain(*names, size_bytes=40)))
    await until(lambda: len(here.taken) == 2)
    assert here.in_flight_bytes == 2 * (40 + len("0.1"))
    here.disk.set()
    assert [answer.detail for answer in await answers] == names
    assert here.in_flight_bytes == 0
    here.disk.clear()
    answers = asyncio.create_task(here.answers(plain(*names)))
    await until(lambda: len(here.taken) == len(names) + 3)
    answers.cancel()
    await asyncio.wait({answers})
    assert (len(here.taken), here.in_flight_bytes) == (len(names) + 3, 0)


async def test_answers_come_in_the_order_of_the_requests_and_together_where_they_can() -> None:
    here = Hub()
    here.late["0.1"] = asyncio.Event()
    requests = here.requests(tuple(plain(f"{n}.1") for n in range(3)))
    responses = here.door.answers(requests, SAMPLER, here.take, group_bytes=100)
    first = asyncio.ensure_future(anext(responses))
    await until(lambda: len(here.taken) == 3)
    assert not first.done()
    here.late["0.1"].set()
    assert [answer.detail for answer in (await first).answers] == ["0.1", "1.1", "2.1"]
    with pytest.raises(StopAsyncIteration):
        await anext(responses)


async def test_a_stream_is_read_only_as_far_as_there_is_room_for_its_bytes() -> None:
    here = Hub(in_flight_bytes=60)
    here.disk.clear()
    requests = (plain("0.1", size_bytes=40), plain("1.1", size_bytes=40), plain("2.1", size_bytes=99))
    answers = asyncio.create_task(here.answers(*requests))
    await until(lambda: len(here.taken) == 1)
    assert (here.read, here.in_flight_bytes) == (2, 40 + len("0.1"))
    here.disk.set()
    assert [answer.detail for answer in await answers] == ["0.1", "1.1", "2.1"]  # the last alone
    assert here.in_flight_bytes == 0


async def test_a_stream_has_so_many_groups_in_flight_and_a_caller_so_many_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission_door, "STREAM_GROUPS", 2)
    here = Hub()
    here.disk.clear()
    many = [plain(f"{n}.1") for n in range(5)]
    streams = [asyncio.create_task(here.answers(*many)) for _ in range(submission_door.STREAMS_PER_CALLER)]
    await until(lambda: len(here.taken) == 4)
    assert here.read == 4
    with refused(Reason.BUSY, "sampler-1"):
        await here.answers(plain("9.1"))
    streams[0].cancel()
    await asyncio.wait({streams[0]})
    here.disk.set()
    assert len(await here.answers(plain("9.1"))) == 1
    assert len(await streams[1]) == 5
    assert here.in_flight_bytes == 0
