"""The interceptor and honest, clumsy and hostile callers, and to servicers that fail."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from heterorl.v1 import membership_pb2, membership_pb2_grpc, policy_pb2, policy_pb2_grpc
from node.enrolment.authority import AUTHORITY_LIFETIME_S
from node.errors import Reason, RefusedError
from node.rpc.call_ends import ConnectionLost, call, classified
from node.rpc.calls.live_rpcs import RpcLimits
from node.rpc.calls.rpc_rules import RULES, service_of
from node.rpc.channel import Purpose, dial
from node.values.limits import MESSAGE_BYTES
from node.values.roles import Role
from support.clock import ManualClock
from support.identity import MadeRun
from support.refusals import refused
from support.rpc import METHODS, Serving, every_service, invoke, refusal_of, rpcs, serving
from support.waiting import until

SECRET = "the tokenizer lives in /srv/private"


POLICIES = "/heterorl.v1.PolicyService"
KINDS = {
    name: f"{POLICIES}/{name}" for name in ("GetManifest", "FetchFrames", "WatchVersions", "UploadFrames")
}
HEARTBEAT = "/heterorl.v1.MembershipService/Heartbeat"


class Policies:
    """Does in each method what the test says: one of each kind, and both ways to write a stream."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.acting = asyncio.Event()
        """Set once a method does it; a call that ends before has nothing to note."""
        self.ended_by: list[str] = []

    def add(self, server: grpc.aio.Server) -> None:
        rpcs({path: getattr(self, name) for name, path in KINDS.items()})(server)

    async def GetManifest(self, request: Any, context: Any) -> policy_pb2.GetManifestResponse:  # noqa: N802
        await self._noting()
        return policy_pb2.GetManifestResponse()

    async def FetchFrames(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[policy_pb2.FetchFramesResponse]:
        yield policy_pb2.FetchFramesResponse()
        await self._noting()
        yield policy_pb2.FetchFramesResponse()

    async def WatchVersions(self, request: Any, context: Any) -> None:  # noqa: N802
        await context.write(policy_pb2.WatchVersionsResponse())
        await self._noting()

    async def UploadFrames(self, requests: Any, context: Any) -> policy_pb2.UploadFramesResponse:  # noqa: N802
        async for _ in requests:
            await self._noting()
        return policy_pb2.UploadFramesResponse()

    async def _noting(self) -> None:
        self.acting.set()
        try:
            await self._act()
        except asyncio.CancelledError:
            self.ended_by.append("cancelled")
            raise


async def answer_heartbeats(requests: Any, context: Any) -> AsyncIterator[membership_pb2.HeartbeatResponse]:
    async for request in requests:
        yield membership_pb2.HeartbeatResponse(sequence=request.sequence)


def learner_channel(made: MadeRun, hub: Serving, purpose: Purpose = Purpose.BULK) -> grpc.aio.Channel:
    return dial(hub.address, made.learner, purpose=purpose, now=time.time())


async def work() -> None:
    return


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("name", KINDS)
async def test_a_refusal_arrives_with_its_reason_status_and_words_and_is_counted(
    made: MadeRun, name: str
) -> None:
    refusal = RefusedError(Reason.MALFORMED, "")

    async def refuse() -> None:
        raise refusal

    async with serving(made, Policies(refuse).add) as hub, learner_channel(made, hub) as channel:
        for reason in Reason:
            refusal = RefusedError(reason, "7 is too many", fix="send 6")
            with pytest.raises(RefusedError) as told, classified():
                await invoke(channel, KINDS[name])
            assert (told.value.reason, str(told.value)) == (reason, "7 is too many; send 6")
            assert isinstance(told.value.__cause__, grpc.aio.AioRpcError)
            assert told.value.__cause__.code().name == reason.status
        assert hub.refusals == {("PolicyService", reason): 1 for reason in Reason}


@pytest.mark.parametrize("name", ["GetManifest", "FetchFrames"])
async def test_an_answer_that_does_not_serialise_is_an_internal_error_without_details(
    made: MadeRun, name: str
) -> None:
    async def answer_nonsense(request: Any, context: Any) -> Any:
        return SECRET

    async def stream_nonsense(request: Any, context: Any) -> AsyncIterator[Any]:
        yield SECRET

    nonsense = {"GetManifest": answer_nonsense, "FetchFrames": stream_nonsense}[name]
    async with serving(made, rpcs({KINDS[name]: nonsense})) as hub, learner_channel(made, hub) as channel:
        with pytest.raises(RefusedError, match=r"^internal error [0-9a-f]{8};") as refused, classified():
            await invoke(channel, KINDS[name])
        assert refused.value.reason is Reason.INTERNAL


@pytest.mark.parametrize("name", KINDS)
async def test_what_a_servicer_raises_by_mistake_is_logged_here_and_never_told_to_the_caller(
    made: MadeRun, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise KeyError(SECRET)

    servicer = Policies(fail)
    async with serving(made, servicer.add) as hub, learner_channel(made, hub) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await invoke(channel, KINDS[name])
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        error = raised.value
        told = f"{error.details()} {error.trailing_metadata()} {error.debug_error_string()}"
        assert "private" not in told
        assert "KeyError" not in told
        [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert SECRET in str(record.exc_info)
        assert getattr(record, "error_id", "no id") in str(error.details())
        assert hub.refusals == {("PolicyService", Reason.INTERNAL): 1}


async def refuse_in_a_group() -> None:
    async def refuse() -> None:
        raise RefusedError(Reason.WRONG_BASE, "version 3 is too old")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refuse())


async def time_out() -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("act", "limits", "reason"),
    [
        (refuse_in_a_group, {}, Reason.WRONG_BASE),
        (time_out, {}, Reason.INTERNAL),  # its own, and no deadline of its caller
        (wait_for_ever, {"unary_s": 0.05}, Reason.BUSY),  # its caller sets no deadline
    ],
)
async def test_a_unary_rpc_ends_with_a_reason_whatever_its_servicer_does(
    made: MadeRun, act: Callable[[], Any], limits: dict[str, Any], reason: Reason
) -> None:
    servicer = Policies(act)
    async with serving(made, servicer.add, **limits) as hub, learner_channel(made, hub) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        with refused(reason), classified():
            await stub.GetManifest(policy_pb2.GetManifestRequest())
    assert servicer.ended_by == (["cancelled"] if act is wait_for_ever else [])


async def test_a_malformed_message_is_refused_as_malformed_and_the_next_one_is_served(made: MadeRun) -> None:
    # A field that says it is longer than the message.
    longer_than_it_is = b"\x0a\xff\xff\xff\x7f"
    paths = [
        path for path, method in METHODS.items() if method.input_type.fields and not method.client_streaming
    ]

    async def in_the_middle() -> AsyncIterator[bytes]:
        yield b""
        yield longer_than_it_is

    async with serving(made, every_service) as hub:
        for path in paths:
            caller = made.of(min(RULES[path].roles or frozenset(Role)))
            async with dial(hub.address, caller, purpose=Purpose.ROLLOUTS, now=time.time()) as channel:
                with refused(Reason.MALFORMED), classified():
                    await invoke(channel, path, longer_than_it_is)
                assert await invoke(channel, path) == [b""]
        async with learner_channel(made, hub) as channel:
            with refused(Reason.MALFORMED), classified():
                await channel.stream_unary(KINDS["UploadFrames"], bytes)(in_the_middle(), timeout=5)
        expected = Counter((service_of(path), Reason.MALFORMED) for path in (*paths, KINDS["UploadFrames"]))
        assert hub.refusals == expected


async def test_an_rpc_that_is_not_served_here_is_answered_with_what_to_do_and_not_a_lost_connection(
    made: MadeRun,
) -> None:
    async with serving(made) as hub, learner_channel(made, hub) as channel:
        for path in METHODS:
            with refused(Reason.WRONG_PORT, "test server", service_of(path)), classified():
                await invoke(channel, path)
        assert hub.refusals == Counter((service_of(path), Reason.WRONG_PORT) for path in METHODS)
        no_such_rpc: Any = channel.unary_unary("/heterorl.v1.PolicyService/NoSuchRpc")
        with refused(Reason.INTERNAL), classified():
            await no_such_rpc(b"", timeout=10)
    async with (
        serving(made, every_service) as hub,
        dial(hub.address, made.relay, purpose=Purpose.CONTROL, now=time.time()) as channel,
    ):
        carry: Any = channel.stream_stream("/heterorl.v1.RelayService/Carry")
        with refused(Reason.PROTOCOL_MISMATCH, "upgrade this relay"), classified():
            await carry().read()
        assert hub.refusals == {("RelayService", Reason.PROTOCOL_MISMATCH): 1}


@pytest.mark.parametrize("service", sorted({*map(service_of, METHODS)} - {"RolloutService", "MergeService"}))
async def test_a_message_over_its_services_limit_is_refused_although_the_port_takes_it(
    made: MadeRun, service: str
) -> None:
    path = {
        "EnrolmentService": "/heterorl.v1.EnrolmentService/Enrol",
        "MembershipService": "/heterorl.v1.MembershipService/GetStatus",
        "ModelService": "/heterorl.v1.ModelService/ListModel",
        "PolicyService": "/heterorl.v1.PolicyService/OfferArtifact",
    }[service]
    limit = MESSAGE_BYTES[service]
    async with (
        serving(made, every_service) as hub,
        dial(hub.address, made.learner, purpose=Purpose.ROLLOUTS, now=time.time()) as channel,
    ):
        # An unknown field is well-formed protobuf: only its size is wrong.
        header = b"\xfa\x3f" + _varint(limit - 6)
        fits = header + bytes(limit - 6)
        assert await invoke(channel, path, fits[:2] + _varint(limit - 7) + bytes(limit - 7)) == [b""]
        with refused(Reason.OVER_LIMIT), classified():
            await invoke(channel, path, header + bytes(limit - 6) + b"\xfa\x3f\x05hello")
        assert hub.refusals == {(service, Reason.OVER_LIMIT): 1}


async def test_a_message_over_the_ports_limit_is_refused_as_over_limit(made: MadeRun) -> None:
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.ssl_target_name_override", "hub.example.heterorl"),
    ]
    learner = made.learner
    credentials = grpc.ssl_channel_credentials(learner.ca_pem, learner.key_pem, learner.certificate_pem)
    async with (
        serving(made, every_service) as hub,
        grpc.aio.secure_channel(hub.address, credentials, options) as channel,
    ):
        with refused(Reason.OVER_LIMIT), classified():
            await invoke(channel, "/heterorl.v1.MembershipService/Join", bytes(65 << 20))


async def test_a_suspicious_refusal_is_a_warning_once_a_minute_and_a_revoked_peer_is_none(
    made: MadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(made, every_service) as hub,
        dial(hub.address, made.sampler, purpose=Purpose.CONTROL, now=time.time()) as channel,
    ):
        for _ in range(3):
            await refusal_of(channel, "/heterorl.v1.PolicyService/OfferArtifact")
        [told] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert (vars(told)["reason"], vars(told)["node_id"]) == ("wrong_role", made.sampler.node_id)
        caplog.clear()
        hub.revoked.add(made.sampler.node_id)
        await refusal_of(channel, "/heterorl.v1.PolicyService/OfferArtifact")
        assert not [record for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_revoked_nodes_live_streams_are_cut_and_its_neighbours_go_on(made: MadeRun) -> None:
    async with (
        serving(made, rpcs({HEARTBEAT: answer_heartbeats})) as hub,
        dial(hub.address, made.sampler, purpose=Purpose.CONTROL, now=time.time()) as channel,
        dial(hub.address, made.other_sampler, purpose=Purpose.CONTROL, now=time.time()) as other_channel,
    ):
        streams = [
            membership_pb2_grpc.MembershipServiceStub(each).Heartbeat(timeout=10)
            for each in (channel, other_channel)
        ]
        for stream in streams:
            await stream.write(membership_pb2.HeartbeatRequest(sequence=1))
            await stream.read()
        hub.revoked.add(made.sampler.node_id)
        with refused(Reason.REVOKED, made.sampler.node_id), classified():
            # Nothing is sent: the cut comes from the timer alone.
            await streams[0].read()
        await streams[1].write(membership_pb2.HeartbeatRequest(sequence=2))
        answer = await streams[1].read()
        assert isinstance(answer, membership_pb2.HeartbeatResponse)
        assert answer.sequence == 2
        streams[1].cancel()


async def test_a_live_stream_is_cut_when_its_certificate_expires(made: MadeRun) -> None:
    clock = ManualClock(now=made.made_at_s)
    servicer = Policies(wait_for_ever)
    async with serving(made, servicer.add, clock=clock) as hub, learner_channel(made, hub) as channel:
        stream = policy_pb2_grpc.PolicyServiceStub(channel).WatchVersions(
            policy_pb2.WatchVersionsRequest(), timeout=10
        )
        await stream.read()
        await servicer.acting.wait()
        clock.advance(AUTHORITY_LIFETIME_S)
        with refused(Reason.EXPIRED), classified():
            await stream.read()
    assert servicer.ended_by == ["cancelled"]


async def test_a_servicer_is_cancelled_when_its_caller_goes_away(made: MadeRun) -> None:
    cancelled = asyncio.Event()

    async def wait_until_cancelled() -> None:
        try:
            await wait_for_ever()
        finally:
            cancelled.set()

    servicer = Policies(wait_until_cancelled)
    async with serving(made, servicer.add) as hub, learner_channel(made, hub) as channel:
        stream = policy_pb2_grpc.PolicyServiceStub(channel).FetchFrames(
            policy_pb2.FetchFramesRequest(), timeout=10
        )
        await stream.read()
        await servicer.acting.wait()
        stream.cancel()
        await cancelled.wait()
        assert hub.refusals == {}
    assert servicer.ended_by == ["cancelled"]


async def test_a_peer_has_so_many_calls_and_ending_one_makes_room(made: MadeRun) -> None:
    servicer = Policies(wait_for_ever)
    async with serving(made, servicer.add, rpcs_per_peer=2) as hub, learner_channel(made, hub) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)

        def watch(stub: Any = stub) -> Any:
            return stub.WatchVersions(policy_pb2.WatchVersionsRequest(), timeout=10)

        streams = [watch(), watch()]
        for stream in streams:
            await stream.read()
        with refused(Reason.BUSY, "2 calls"), classified():
            await watch().read()
        assert hub.refusals == {("PolicyService", Reason.BUSY): 1}
        async with dial(hub.address, made.sampler, purpose=Purpose.BULK, now=time.time()) as other:
            theirs = watch(policy_pb2_grpc.PolicyServiceStub(other))
            await theirs.read()
            theirs.cancel()
        streams[0].cancel()
        await until(lambda: hub.server.live_rpcs == 1)
        await watch().read()


@pytest.mark.parametrize(
    ("reason", "between_looks_s"), [(Reason.BUSY, RpcLimits().stall_s), (Reason.REVOKED, 0.0)]
)
async def test_a_reader_that_stops_loses_its_stream_quietly(
    made: MadeRun, caplog: pytest.LogCaptureFixture, reason: Reason, between_looks_s: float
) -> None:
    async def pour(request: Any, context: Any) -> AsyncIterator[policy_pb2.FetchFramesResponse]:
        while True:
            yield policy_pb2.FetchFramesResponse(data=bytes(1 << 20))

    firehose, clock = rpcs({KINDS["FetchFrames"]: pour}), ManualClock(now=made.made_at_s)
    async with (
        serving(made, firehose, clock=clock, refusal_s=0.05) as hub,
        learner_channel(made, hub) as channel,
    ):
        stream = policy_pb2_grpc.PolicyServiceStub(channel).FetchFrames(
            policy_pb2.FetchFramesRequest(), timeout=20
        )
        await stream.read()
        if reason is Reason.REVOKED:
            hub.revoked.add(made.learner.node_id)

        def has_ended() -> bool:
            clock.advance(between_looks_s)
            return hub.server.live_rpcs == 0

        await until(has_ended)
        assert hub.refusals == {("PolicyService", reason): 1}
        stream.cancel()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_upload_that_stops_is_given_up_and_a_silent_endless_stream_is_not(made: MadeRun) -> None:
    servicer = Policies(work)
    async with (
        serving(made, servicer.add, rpcs({HEARTBEAT: answer_heartbeats}), stall_s=0.1) as hub,
        learner_channel(made, hub) as channel,
    ):
        heartbeats = membership_pb2_grpc.MembershipServiceStub(channel).Heartbeat(timeout=10)
        upload = policy_pb2_grpc.PolicyServiceStub(channel).UploadFrames(timeout=10)
        await upload.write(policy_pb2.UploadFramesRequest())
        with refused(Reason.BUSY), classified():
            await upload
        await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=1))
        assert await heartbeats.read() != grpc.aio.EOF
        heartbeats.cancel()


async def test_as_many_calls_as_a_peer_may_have_are_served_whole_on_one_channel(made: MadeRun) -> None:
    servicer = Policies(work)
    async with serving(made, servicer.add) as hub, learner_channel(made, hub) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        request = policy_pb2.GetManifestRequest()
        most = RpcLimits().rpcs_per_peer
        await asyncio.gather(*(call(stub.GetManifest, request, timeout_s=30) for _ in range(most)))


async def test_a_deadline_that_passes_is_a_lost_connection(made: MadeRun) -> None:
    servicer = Policies(wait_for_ever)
    async with serving(made, servicer.add) as hub, learner_channel(made, hub) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        with pytest.raises(ConnectionLost, match="DEADLINE_EXCEEDED"):
            await call(stub.GetManifest, policy_pb2.GetManifestRequest(), timeout_s=0.05)


def _varint(value: int) -> bytes:
    """Four bytes whatever the value, so that sizes stay countable."""
    return bytes(value >> shift & 0x7F | (0x80 if shift < 21 else 0) for shift in (0, 7, 14, 21))
