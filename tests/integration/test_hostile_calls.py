"""Calls that cost a hub more than their caller: half-open, compressed, or far too many."""

import asyncio
import time
from collections import Counter
from typing import Any

import grpc.aio
import pytest

from heterorl.v1 import common_pb2, rollout_pb2
from node.errors import Reason
from node.rpc.call_ends import classified
from node.rpc.calls import rpc_rules
from node.rpc.calls.call_rates import Rate
from node.rpc.calls.rpc_rules import RULES, Rule
from node.rpc.channel import Purpose, dial
from node.values.roles import Role
from support.clock import ManualClock
from support.identity import MadeRun
from support.refusals import refused
from support.rpc import METHODS, every_service, invoke, rpcs, serving
from support.strangers import flood, gzip_bombs, half_open_calls
from support.waiting import until

MEMBERSHIP = "/heterorl.v1.MembershipService"
STATUS = f"{MEMBERSHIP}/GetStatus"
HEARTBEAT = f"{MEMBERSHIP}/Heartbeat"
SUBMIT = "/heterorl.v1.RolloutService/SubmitRollouts"
RELEASE = "/heterorl.v1.RolloutService/ReleaseLeases"
LEASE = "/heterorl.v1.RolloutService/LeasePrompts"


def channel_of(made: MadeRun, address: str) -> grpc.aio.Channel:
    return dial(address, made.sampler, purpose=Purpose.ROLLOUTS, now=time.time())


def allow(monkeypatch: pytest.MonkeyPatch, path: str, **changes: Any) -> None:
    rule = RULES[path]
    monkeypatch.setitem(rpc_rules.RULES, path, Rule(rule.roles, rule.is_endless, **changes))


async def test_a_call_whose_first_message_does_not_come_is_refused(made: MadeRun) -> None:
    refusals: Counter[tuple[str, Reason]] = Counter()
    async with serving(made, every_service, first_message_s=0.05) as hub:
        for path in METHODS:
            caller = made.of(min(RULES[path].roles or {Role.SAMPLER}))
            async with dial(hub.address, caller, purpose=Purpose.CONTROL, now=time.time()) as channel:
                assert await half_open_calls(channel, path, 3) == {"busy": 3}
            refusals[rpc_rules.service_of(path), Reason.BUSY] += 3
        await until(lambda: hub.server.live_rpcs == 0)
        assert hub.refusals == refusals


async def test_a_caller_that_may_not_call_is_refused_before_its_message_is_read(made: MadeRun) -> None:
    async with serving(made, every_service) as hub, channel_of(made, hub.address) as channel:
        offer = "/heterorl.v1.PolicyService/OfferArtifact"
        assert await half_open_calls(channel, offer, 1) == {"wrong_role": 1}


async def test_a_compressed_message_is_refused_and_never_inflated(made: MadeRun) -> None:
    heard: list[Any] = []

    async def release(request: Any, context: Any) -> rollout_pb2.ReleaseLeasesResponse:
        heard.append(request)
        return rollout_pb2.ReleaseLeasesResponse()

    async with (
        serving(made, rpcs({RELEASE: release})) as hub,
        channel_of(made, hub.address) as channel,
    ):
        request = rollout_pb2.ReleaseLeasesRequest(lease_ids=["0" * (1 << 20)]).SerializeToString()
        call: Any = channel.unary_unary(RELEASE)
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            with refused(Reason.MALFORMED), classified():
                await call(request, compression=compression, timeout=10)
        assert heard == []
        assert hub.refusals == {("RolloutService", Reason.MALFORMED): 2}
        assert await gzip_bombs(channel, RELEASE, 3, size_bytes=1 << 20) == {"malformed": 3}
        await call(request, timeout=10)
        assert len(heard) == 1


async def test_an_answer_that_is_compressed_is_not_inflated_either(made: MadeRun) -> None:
    server = grpc.aio.server(compression=grpc.Compression.Gzip)

    async def answer(request: bytes, context: Any) -> bytes:
        return bytes(1 << 20)

    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"M": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with dial(f"127.0.0.1:{port}", made.sampler.peer, purpose=Purpose.BULK, now=0) as channel:
            method: Any = channel.unary_unary("/S/M")
            assert len(await method(b"", timeout=10)) < 4096
    finally:
        await server.stop(0)


async def test_a_peer_that_calls_too_often_is_refused_and_named_and_its_neighbour_is_served(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allow(monkeypatch, STATUS, rate=Rate(per_s=2, burst=5))
    clock = ManualClock(now=time.time())
    async with (
        serving(made, every_service, clock=clock, impatient_s=0.01) as hub,
        channel_of(made, hub.address) as channel,
        dial(hub.address, made.other_sampler, purpose=Purpose.CONTROL, now=time.time()) as others,
    ):
        assert await flood(channel, STATUS, b"", number=20) == {"ok": 5, "too_often": 15}
        assert hub.refusals == {("MembershipService", Reason.TOO_OFTEN): 15}
        assert await flood(others, STATUS, b"", number=5) == {"ok": 5}
        assert await flood(channel, LEASE, b"", number=5) == {"ok": 5}
        with refused(Reason.TOO_OFTEN, "0.5 s"), classified():
            await invoke(channel, STATUS)
        assert Reason.TOO_OFTEN.is_retryable
        clock.advance(1.0)
        assert await flood(channel, STATUS, b"", number=5) == {"ok": 2, "too_often": 3}
    [told] = [record for record in caplog.records if record.message == "peer asks too much"]
    assert told.__dict__["peer"] == made.sampler.node_id


async def test_refused_groups_use_up_a_peers_rate_and_those_taken_in_do_not(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = Rate(per_s=0.001, burst=40, refused=9)
    allow(monkeypatch, SUBMIT, message_rate=rate, refusals=RULES[SUBMIT].refusals, is_answered_each=True)
    verdicts = [common_pb2.VERDICT_SPOOLED] * 10
    heard: list[Any] = []

    async def submit(requests: Any, context: Any) -> Any:
        async for request in requests:
            heard.append(request)
            verdict = verdicts.pop() if verdicts else common_pb2.VERDICT_FOREIGN
            yield rollout_pb2.SubmitRolloutsResponse(answers=[rollout_pb2.SubmissionAnswer(verdict=verdict)])

    async def groups() -> Any:
        for _ in range(30):
            yield b""

    async with serving(made, rpcs({SUBMIT: submit})) as hub, channel_of(made, hub.address) as channel:
        submit_on: Any = channel.stream_stream(SUBMIT)
        first = submit_on(groups(), timeout=60)
        for _ in range(13):
            await first.read()
        second = submit_on(groups(), timeout=60)
        late = [asyncio.ensure_future(stream.read()) for stream in (first, second)]
        assert not (await asyncio.wait(late, timeout=0.2))[0]
        assert len(heard) == 13
        first.cancel()
        second.cancel()
        await asyncio.wait(late)


async def test_a_group_that_cannot_be_read_is_its_servicers_to_refuse(made: MadeRun) -> None:
    heard: list[Any] = []

    async def submit(requests: Any, context: Any) -> Any:
        async for request in requests:
            heard.append(request)
            yield rollout_pb2.SubmitRolloutsResponse()

    async def groups() -> Any:
        yield b"\xff"
        yield bytes((1 << 20) + 1)
        yield b""

    async with (
        serving(made, rpcs({SUBMIT: submit}), submission_bytes=1 << 20) as hub,
        channel_of(made, hub.address) as channel,
    ):
        stream: Any = channel.stream_stream(SUBMIT)(groups(), timeout=10)
        assert len([each async for each in stream]) == 3
    assert [getattr(each, "reason", None) for each in heard] == [Reason.MALFORMED, Reason.OVER_LIMIT, None]


async def test_so_many_calls_wait_for_their_refusal_and_others_get_it_at_once(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, STATUS, rate=Rate(per_s=0.001, burst=1))
    async with (
        serving(made, every_service, impatient_s=60, held_back=3) as hub,
        channel_of(made, hub.address) as channel,
    ):
        calls = asyncio.create_task(flood(channel, STATUS, b"", number=10))
        await until(lambda: hub.refusals["MembershipService", Reason.TOO_OFTEN] == 10 - 1 - 3)
        assert not calls.done()
        calls.cancel()
