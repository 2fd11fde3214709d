import asyncio
import itertools

import grpc.aio
import pytest

from node.errors import Reason, RefusedError
from node.identity.peer import Peer, server_name
from node.rpc.call_ends import HUB_CLOCK_KEY, REASON_KEY, ConnectionLost, classified, classify
from node.rpc.calls.caller import USER_AGENT_PREFIX
from node.rpc.channel import Keepalive, Purpose, dial, dial_as_stranger
from node.system.backoff import Backoff
from node.values import limits
from node.values.roles import Role
from support.refusals import cannot_start


def failure(code: grpc.StatusCode, details: str = "", reason: str | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if reason is None else grpc.aio.Metadata((REASON_KEY, reason))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_is_known_by_its_reason_whatever_its_status(reason: Reason) -> None:
    status = grpc.StatusCode[reason.status]
    assert status is not grpc.StatusCode.OK
    refused = classify(failure(status, "7 is too many", reason.value))
    assert isinstance(refused, RefusedError)
    assert (refused.reason, str(refused)) == (reason, "7 is too many")


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        *((code, "went away", None) for code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN")),
        ("RESOURCE_EXHAUSTED", "went away", None),
        ("INTERNAL", "larger than max", None),
        ("INTERNAL", "went away", "because"),  # a reason nobody knows is not believed
    ],
)
def test_what_carries_no_reason_of_ours_is_a_lost_connection(
    code: str, details: str, reason: str | None
) -> None:
    lost = classify(failure(grpc.StatusCode[code], details, reason))
    assert isinstance(lost, ConnectionLost)
    assert code in str(lost)


@pytest.mark.parametrize(
    ("code", "details", "reason", "said"),
    [
        ("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)", Reason.OVER_LIMIT, "9 vs. 4"),
        ("UNIMPLEMENTED", "Method not found!", Reason.INTERNAL, "does not know this rpc"),
    ],
)
def test_what_grpc_refuses_by_itself_is_a_refusal(code: str, details: str, reason: Reason, said: str) -> None:
    refused = classify(failure(grpc.StatusCode[code], details))
    assert isinstance(refused, RefusedError)
    assert refused.reason is reason
    assert said in str(refused)


@pytest.mark.parametrize(
    ("details", "hint"),
    [
        ("certificate has expired", "one of the two is wrong"),
        ("certificate is not yet valid", "one of the two is wrong"),
        ("SSL_ERROR_SSL: wrong version", "not a hub of this run"),
        ("Hostname Verification Check failed", "not a hub of this run"),
        ("Socket closed", "may not accept this node's certificate"),
        ("Connection refused", "Connection refused"),
        ("", "large packets are lost"),
        ("Deadline Exceeded", "large packets are lost"),
    ],
)
def test_a_connection_that_tls_ended_says_what_may_be_wrong(details: str, hint: str) -> None:
    lost = str(classify(failure(grpc.StatusCode.UNAVAILABLE, details)))
    assert hint in lost
    assert lost.endswith(")") == (details != hint)


@pytest.mark.parametrize(
    ("said", "hub_now_s"), [("12.5", 12.5), ("nan", None), ("inf", None), ("soon", None), (None, None)]
)
def test_a_refusal_carries_the_hubs_clock_where_it_said_what_it_shows(
    said: str | None, hub_now_s: float | None
) -> None:
    pairs = [(REASON_KEY, "busy"), *([] if said is None else [(HUB_CLOCK_KEY, said)])]
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(*pairs))
    refused = classify(error)
    assert isinstance(refused, RefusedError)
    assert refused.hub_now_s == hub_now_s


PEER = Peer("run", Role.SAMPLER, "s1")


@pytest.mark.parametrize(
    ("purpose", "most_bytes"),
    [(Purpose.CONTROL, 4 << 20), (Purpose.ROLLOUTS, 72 << 20), (Purpose.BULK, 6 << 20)],
)
def test_a_channel_takes_messages_of_its_purpose_and_says_who_calls(
    monkeypatch: pytest.MonkeyPatch, purpose: Purpose, most_bytes: int
) -> None:
    dialled: dict[str, dict[str, object]] = {}
    monkeypatch.setattr(
        grpc.aio, "insecure_channel", lambda target, options: dialled.update({target: dict(options)})
    )
    dial("127.0.0.1:7700", PEER, purpose=purpose, now=0.0, keepalive=Keepalive(ping_after_s=7.0))
    options = dialled["127.0.0.1:7700"]
    assert options["grpc.max_send_message_length"] == most_bytes
    assert options["grpc.max_receive_message_length"] == most_bytes
    assert options["grpc.primary_user_agent"] == USER_AGENT_PREFIX + PEER.spiffe_id
    assert options["grpc.keepalive_time_ms"] == 7000
    assert ("grpc.http2.lookahead_bytes" in options) == (purpose is Purpose.BULK)


def test_a_stranger_dials_by_the_hubs_name_for_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: dict[str, dict[str, object]] = {}
    monkeypatch.setattr(
        grpc.aio,
        "secure_channel",
        lambda target, credentials, options: dialled.update({target: dict(options)}),
    )
    monkeypatch.setattr(grpc, "ssl_channel_credentials", lambda ca_pem: ca_pem)
    dial_as_stranger("hub:7701", run_id="run", ca_pem=b"ca")
    assert dialled["hub:7701"]["grpc.max_receive_message_length"] == limits.MESSAGE_BYTES["EnrolmentService"]
    assert dialled["hub:7701"]["grpc.ssl_target_name_override"] == server_name("run", Role.COORDINATOR)


@pytest.mark.parametrize("target", ["10.0.0.1:7700", "hub.example.org:7700"])
def test_without_tls_no_other_machine_is_dialled(target: str) -> None:
    with cannot_start(target):
        dial(target, PEER, purpose=Purpose.CONTROL, now=0.0)


def test_a_write_to_a_stream_that_has_ended_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost), classified():
        raise asyncio.InvalidStateError


def test_mistakes_pass_as_they_are() -> None:
    with pytest.raises(KeyError), classified():
        raise KeyError("mistake")


async def test_a_task_that_is_cancelled_stays_so_and_a_call_that_is_cancelled_is_a_lost_connection() -> None:
    call: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        with classified():
            await call

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert call.cancelled()
    with pytest.raises(ConnectionLost):
        await wait()


def test_ceilings_double_up_to_the_cap_and_start_again_after_success_or_for_another() -> None:
    backoff = Backoff(lambda: 1.0, first_s=0.2, cap_s=3.0)
    assert [backoff.next_s() for _ in range(6)] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.0, 3.0])
    another = backoff.another()
    backoff.reset()
    assert backoff.next_s() == another.next_s() == pytest.approx(0.2)
    assert (backoff.retries, another.retries) == (7, 1)
    assert [another.next_s() for _ in range(5)][-1] == 3.0


def test_delays_are_drawn_over_the_whole_range_below_the_ceiling() -> None:
    numbers = itertools.cycle([0.0, 0.5, 0.999])
    backoff = Backoff(lambda: next(numbers), first_s=1.0, cap_s=1.0)
    assert [backoff.next_s() for _ in range(3)] == pytest.approx([0.0, 0.5, 0.999])


async def test_a_wait_ends_early_when_its_event_comes() -> None:
    event = asyncio.Event()
    backoff = Backoff(lambda: 1.0, first_s=60.0, cap_s=60.0)
    asyncio.get_running_loop().call_soon(event.set)
    async with asyncio.timeout(5):
        await backoff.wait(event)
