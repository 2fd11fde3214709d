"""A client's stream of submissions, against a server that answers as a test tells it to."""

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.clients.rollouts import submission_stream
from node.clients.rollouts.submission_stream import SubmissionStream
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost
from node.rpc.calls.rpc_rules import SUBMIT_ROLLOUTS
from node.rpc.channel import Purpose, dial
from node.rpc.hub import Hub as Hubs
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.limits import GROUPS_PER_REQUEST
from node.wire.rollouts import submitted_from_wire
from support.identity import MadeRun
from support.rpc import rpcs, serving
from support.waiting import eventually, until

Answer = Callable[[list[str]], Awaitable[list[rollout_pb2.SubmissionAnswer]]]


def spooled(detail: str = "") -> rollout_pb2.SubmissionAnswer:
    return rollout_pb2.SubmissionAnswer(verdict=common_pb2.VERDICT_SPOOLED, detail=detail)


class Hub:
    """Reads group ids; ``answer`` gets those of one stream so far, once for each that comes."""

    def __init__(self, *, groups_per_request: int = 0) -> None:
        self.streams: list[list[str]] = []
        self.requests: list[str] = []
        """The ids in each request, one after the other."""
        self.groups_per_request = groups_per_request
        """The number that it tells; 0: none, as release 0.3."""
        self.answer: Answer = self._at_once

    async def _at_once(self, heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        return [spooled(heard[-1])]

    async def serve(self, requests: Any, context: Any) -> AsyncIterator[rollout_pb2.SubmitRolloutsResponse]:
        heard: list[str] = []
        self.streams.append(heard)
        async for request in requests:
            ids = [group.group_id for group in submitted_from_wire(request)]
            self.requests.append("".join(ids))
            for group_id in ids:
                heard.append(group_id)
                if answers := await self.answer(heard):
                    yield rollout_pb2.SubmitRolloutsResponse(
                        answers=answers, groups_per_request=self.groups_per_request
                    )


@asynccontextmanager
async def stream_to(made: MadeRun, hub: str | Hubs) -> AsyncIterator[SubmissionStream]:
    async with dial(hub, made.sampler, purpose=Purpose.ROLLOUTS, now=time.time()) as channel:
        stream = SubmissionStream(channel)
        yield stream
        await stream.close()


@asynccontextmanager
async def submitting(made: MadeRun, hub: Hub) -> AsyncIterator[SubmissionStream]:
    async with (
        serving(made, rpcs({SUBMIT_ROLLOUTS: hub.serve})) as server,
        stream_to(made, server.address) as stream,
    ):
        yield stream


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
async def stream(made: MadeRun, hub: Hub) -> AsyncIterator[SubmissionStream]:
    async with submitting(made, hub) as stream:
        yield stream


def submitted(
    stream: SubmissionStream, *names: str, size_bytes: int = 1
) -> list[asyncio.Task[tuple[Verdict, str]]]:
    return [asyncio.create_task(stream.submit(EncodedGroup(b"", bytes(size_bytes), name))) for name in names]


async def outcomes(tasks: list[asyncio.Task[tuple[Verdict, str]]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_many_groups_are_on_their_way_on_one_stream_and_each_gets_its_answer(
    hub: Hub, stream: SubmissionStream
) -> None:
    async def in_threes(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        return [] if len(heard) % 3 else [spooled(name) for name in heard[-3:]]

    hub.answer = in_threes
    found = await outcomes(submitted(stream, "a", "b", "c", "d", "e", "f"))
    assert found == [(Verdict.SPOOLED, name) for name in "abcdef"]
    assert hub.streams == [["a", "b", "c", "d", "e", "f"]]
    assert hub.requests == ["a", "b", "c", "d", "e", "f"]  # it has not said that it reads several


@pytest.mark.parametrize(
    ("says", "size_bytes", "requests"),
    [
        (0, 1, ["a", "b", "c", "d", "e", "f"]),
        (3, 1, ["a", "bcd", "ef"]),
        (3, 40, ["a", "bc", "de", "f"]),
        (3, 101, ["a", "b", "c", "d", "e", "f"]),
        (GROUPS_PER_REQUEST + 1, 1, ["a", "bcdef"]),
        (-1, 1, ["a", "b", "c", "d", "e", "f"]),
    ],
)
async def test_groups_that_wait_go_in_one_request_as_far_as_the_hub_of_their_stream_says_that_it_reads(
    hub: Hub,
    stream: SubmissionStream,
    monkeypatch: pytest.MonkeyPatch,
    says: int,
    size_bytes: int,
    requests: list[str],
) -> None:
    monkeypatch.setattr(submission_stream, "JOINED_GROUPS_BYTES", 100)
    hub.groups_per_request = says
    for names in ("a", "bcdef"):
        found = await outcomes(submitted(stream, *names, size_bytes=size_bytes))
        assert found == [(Verdict.SPOOLED, name) for name in names]
    assert hub.requests == requests


async def test_the_next_stream_begins_with_a_group_alone_since_it_may_be_to_an_older_hub(
    hub: Hub, stream: SubmissionStream
) -> None:
    hub.groups_per_request = 8

    async def ends_at_c(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        if heard == ["a", "b", "c"]:
            raise RefusedError(Reason.DRAINING, "the hub is stopping")
        return [spooled(heard[-1])]

    hub.answer = ends_at_c
    await outcomes(submitted(stream, "a"))
    b, c, d = await outcomes(submitted(stream, "b", "c", "d"))
    assert b == (Verdict.SPOOLED, "b")
    assert [getattr(error, "reason", None) for error in (c, d)] == [Reason.DRAINING] * 2
    for names in ("c", "de"):
        assert await outcomes(submitted(stream, *names)) == [(Verdict.SPOOLED, name) for name in names]
    assert hub.requests == ["a", "bcd", "c", "de"]


async def test_groups_that_cannot_be_sent_are_their_callers_and_the_stream_goes_on(
    stream: SubmissionStream,
) -> None:
    cannot, can = await outcomes(submitted(stream, "\ud800", "a"))
    assert isinstance(cannot, UnicodeEncodeError)
    assert can == (Verdict.SPOOLED, "a")


async def test_a_group_that_is_refused_is_told_why_and_the_others_are_not_touched(
    hub: Hub, stream: SubmissionStream
) -> None:
    async def second_and_fourth(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        reasons = {2: "busy", 4: "a reason of a later version"}
        refusal = rollout_pb2.SubmissionAnswer(reason=reasons.get(len(heard), ""), detail="later")
        return [refusal if refusal.reason else spooled()]

    hub.answer = second_and_fourth
    first, second, third, fourth = await outcomes(submitted(stream, "a", "b", "c", "d"))
    assert first == third == (Verdict.SPOOLED, "")
    assert isinstance(second, RefusedError)
    assert (second.reason, second.is_remote) == (Reason.BUSY, True)
    assert isinstance(fourth, ConnectionLost)  # it may be sent again
    assert len(hub.streams) == 1


async def test_a_stream_that_ends_is_lost_for_all_that_wait_and_the_next_group_opens_another(
    hub: Hub, stream: SubmissionStream
) -> None:
    async def end_at_two(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        if len(hub.streams) == 1 and len(heard) == 2:
            raise RefusedError(Reason.DRAINING, "the hub is stopping")
        return [] if len(hub.streams) == 1 else [spooled()]

    hub.answer = end_at_two
    lost = await outcomes(submitted(stream, "a", "b"))
    assert [getattr(error, "reason", None) for error in lost] == [Reason.DRAINING] * 2
    assert await outcomes(submitted(stream, "a", "b")) == [(Verdict.SPOOLED, "")] * 2
    assert hub.streams == [["a", "b"], ["a", "b"]]


async def test_one_group_that_ends_the_stream_for_good_is_found_among_many(
    hub: Hub, stream: SubmissionStream
) -> None:
    async def not_c(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        if "c" in heard:
            raise RefusedError(Reason.OVER_LIMIT, "larger than gRPC reads")
        return [] if len(hub.streams) == 1 else [spooled(heard[-1])]

    hub.answer = not_c
    lost = await outcomes(submitted(stream, "a", "b", "c"))
    assert [type(error) for error in lost] == [ConnectionLost] * 3
    a, c, b = await outcomes(submitted(stream, "a", "c", "b"))
    assert (a, b) == ((Verdict.SPOOLED, "a"), (Verdict.SPOOLED, "b"))
    assert isinstance(c, RefusedError)
    assert c.reason is Reason.OVER_LIMIT


async def test_a_hub_that_does_not_answer_is_given_up(
    hub: Hub, stream: SubmissionStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_stream, "ANSWER_TIMEOUT_S", 0.05)

    async def never(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        return []

    hub.answer = never
    (lost,) = await outcomes(submitted(stream, "a"))
    assert isinstance(lost, ConnectionLost)
    assert "no answer to a group" in str(lost)


async def test_bytes_on_their_way_are_bounded(
    made: MadeRun, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_stream, "IN_FLIGHT_BYTES", 100)
    gate = asyncio.Event()

    async def when_open(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        await gate.wait()
        return [spooled()]

    hub.answer = when_open
    async with submitting(made, hub) as stream:
        tasks = submitted(stream, "a", "b", "c", size_bytes=50)
        await until(lambda: bool(hub.streams) and hub.streams[0] == ["a"])
        assert stream._room.used_bytes == 100
        gate.set()
        assert await outcomes(tasks) == [(Verdict.SPOOLED, "")] * 3
        assert stream._room.used_bytes == 0


async def test_a_caller_that_goes_away_leaves_the_others_their_answers(
    hub: Hub, stream: SubmissionStream
) -> None:
    gate = asyncio.Event()

    async def when_open(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        if heard == ["a"]:
            return []
        await gate.wait()
        return [spooled(name) for name in heard]

    hub.answer = when_open
    gone, stays = submitted(stream, "a", "b")
    await until(lambda: hub.streams == [["a", "b"]])
    gone.cancel()
    gate.set()
    assert await stays == (Verdict.SPOOLED, "b")


async def test_a_caller_that_goes_away_leaves_nothing_that_is_logged_as_lost(made: MadeRun) -> None:
    hub = Hub()

    async def never(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        await asyncio.Event().wait()
        return []

    hub.answer = never
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    async with submitting(made, hub) as stream:
        stream._singly = 2  # each group is written, and waited for, before the next
        (gone,) = submitted(stream, "a")
        await until(lambda: bool(hub.streams) and hub.streams[0] == ["a"])
        gone.cancel()
        await asyncio.wait({gone})
    del gone, stream
    gc.collect()
    assert logged == []


async def test_more_answers_than_groups_end_the_stream(hub: Hub, stream: SubmissionStream) -> None:
    async def twice(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        return [spooled(), spooled()]

    async def is_on_another() -> bool:
        await outcomes(submitted(stream, "b"))
        return len(hub.streams) > 1

    hub.answer = twice
    assert await outcomes(submitted(stream, "a")) == [(Verdict.SPOOLED, "")]
    await eventually(is_on_another)


@pytest.mark.parametrize(
    ("error", "ends"),
    [(ConnectionLost("no heartbeat was answered"), True), (RefusedError(Reason.DRAINING, "it stops"), False)],
)
async def test_a_stream_to_a_hub_that_answers_no_heartbeats_ends_and_the_next_is_to_another(
    made: MadeRun, error: ConnectionLost | RefusedError, ends: bool
) -> None:
    hung, other = Hub(), Hub()
    told = asyncio.Event()

    async def when_told(heard: list[str]) -> list[rollout_pb2.SubmissionAnswer]:
        await told.wait()
        return [spooled("late")]

    hung.answer = when_told
    async with (
        serving(made, rpcs({SUBMIT_ROLLOUTS: hung.serve})) as first,
        serving(made, rpcs({SUBMIT_ROLLOUTS: other.serve})) as second,
        stream_to(made, hubs := Hubs(f"{first.address},{second.address}")) as stream,
    ):
        waiting = submitted(stream, "a", "b")
        await until(lambda: hung.streams == [["a"]])
        hubs.move_on_after(error)
        if not ends:
            told.set()
        found = await outcomes(waiting)
        assert [isinstance(each, ConnectionLost) for each in found] == [ends] * 2
        if ends:
            assert await outcomes(submitted(stream, "a")) == [(Verdict.SPOOLED, "a")]
        assert other.streams == ([["a"]] if ends else [])


async def test_a_group_for_a_hub_that_accepts_connections_and_says_nothing_goes_to_another(
    made: MadeRun, hub: Hub
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with (
            serving(made, rpcs({SUBMIT_ROLLOUTS: hub.serve})) as server,
            stream_to(made, hubs := Hubs(f"127.0.0.1:{mute.getsockname()[1]},{server.address}")) as stream,
        ):
            waiting = submitted(stream, "a", "b")
            connected, _ = await asyncio.to_thread(mute.accept)
            hubs.move_on_after(ConnectionLost("no heartbeat was answered"))
            assert [type(each) for each in await outcomes(waiting)] == [ConnectionLost, tuple]
            assert await outcomes(submitted(stream, "a")) == [(Verdict.SPOOLED, "a")]
            assert hub.streams == [["b", "a"]]
        connected.close()


@pytest.mark.parametrize("steps", range(5))
async def test_a_group_that_is_given_up_at_any_moment_does_not_get_the_answer_of_the_next(
    hub: Hub, stream: SubmissionStream, steps: int
) -> None:
    hub.groups_per_request = 8
    assert await outcomes(submitted(stream, "a")) == [(Verdict.SPOOLED, "a")]
    (given_up,) = submitted(stream, "b")
    for _ in range(steps):  # of the loop, by which it waits for room, is unwritten, is written
        await asyncio.sleep(0)
    given_up.cancel()
    found = await outcomes(submitted(stream, "c", "d"))
    again = await outcomes(submitted(stream, "c", "d"))
    for name, each in zip("cd", found, strict=True):
        assert isinstance(each, ConnectionLost) or each == (Verdict.SPOOLED, name)
    assert again == [(Verdict.SPOOLED, "c"), (Verdict.SPOOLED, "d")]


async def test_a_stream_that_is_dropped_between_two_groups_leaves_no_task_behind(
    hub: Hub, stream: SubmissionStream
) -> None:
    """A task that nobody holds is destroyed while it waits, which asyncio logs as an error."""
    for name in ("a", "b"):
        assert await outcomes(submitted(stream, name)) == [(Verdict.SPOOLED, name)]
        await until(lambda: not any("_read" in repr(task.get_coro()) for task in asyncio.all_tasks()))
    assert hub.streams == [["a", "b"]]
