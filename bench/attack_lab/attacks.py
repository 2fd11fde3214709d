"""The attacks by name; each goes on until it is cancelled, at a bounded rate, on loopback addresses only."""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import count, product
from typing import Any, Final

import grpc
import grpc.aio

from bench.attack_lab.enemy import CALL_TIMEOUT_S, Enemy, Foe
from bench.attack_lab.task import CoinTask
from heterorl.v1 import membership_pb2, rollout_pb2
from node.clients.rollouts.rollout_client import SamplerRolloutClient
from node.coordinator.work.slots.slot import slot_and_attempt
from node.rpc.address import join_address
from node.rpc.channel import dial_as_stranger
from node.values.groups.rollout import EncodedGroup, LeasePurpose, PromptLease
from node.values.roles import Role
from node.wire.rollouts import group_to_wire

PAUSE_S: Final = 0.05
"""Between two rounds: an attack must not win by using up the machine it shares with the run."""

IDLE_CONNECTIONS: Final = 1100
RECONNECT_S: Final = 30.0
"""More often, handshakes would take all of the attacker's own time."""
HALF_OPEN_CALLS: Final = 9000
HALF_OPEN_CHANNELS: Final = 9
CRAWLING_CLIENTS: Final = 64
FLOOD_CALLERS: Final = 16
UNKNOWN_BYTES: Final = 60 << 20
BOMB_BYTES: Final = 60 << 20
STORM_SAMPLERS: Final = 200


async def hoard(enemy: Enemy) -> None:
    """Lease all there is and keep it by heartbeats."""
    foe, held = await _sampler(enemy), list[str]()
    async with enemy.heartbeats(foe, held):
        async for leases in _leases(enemy, foe):
            held += [lease.lease_id for lease in leases]


async def drop(enemy: Enemy) -> None:
    """Lease all there is and never answer."""
    foe = await _sampler(enemy)
    async with enemy.heartbeats(foe, ()):
        async for _ in _leases(enemy, foe):
            pass


async def fail_all(enemy: Enemy) -> None:
    """Fail every lease as too long."""
    foe, fault = await _sampler(enemy), rollout_pb2.LEASE_FAULT_PROMPT_TOO_LONG
    async with enemy.heartbeats(foe, ()):
        async for leases in _leases(enemy, foe):
            failed = [
                rollout_pb2.FailedLease(lease_id=lease.lease_id, fault=fault, detail="a lie")
                for lease in leases
            ]
            request = rollout_pb2.ReleaseLeasesRequest(failed=failed)
            await enemy.tried("failed", foe.rollouts.ReleaseLeases(request, timeout=CALL_TIMEOUT_S))


async def absurd_size(enemy: Enemy) -> None:
    """Join again and again with another number of prompts, under several names."""
    foes = [enemy.foe(Role.SAMPLER, f"sampler-size-{n}") for n in range(2)]
    while True:
        for foe in foes:
            await enemy.join(foe, prompts=1 << 40)
        await asyncio.sleep(1)


async def forge_evaluations(enemy: Enemy) -> None:
    """Answer held-out prompts with the largest reward there is."""
    await _submit_for_ever(enemy, reward=3e38, purpose=LeasePurpose.EVALUATION)


async def forge_logprobs(enemy: Enemy) -> None:
    """Submit random tokens with made-up logprobs."""
    await _submit_for_ever(enemy, reward=None, purpose=LeasePurpose.TRAINING)


async def absurd_rewards(enemy: Enemy) -> None:
    """Submit groups with rewards of 1e30."""
    await _submit_for_ever(enemy, reward=1e30, purpose=LeasePurpose.TRAINING)


async def step_report(enemy: Enemy) -> None:
    """Report a gradient step of version 2^62 as a sampler."""
    foe = await _sampler(enemy)
    while True:
        request = membership_pb2.HeartbeatRequest(sequence=1, instance=foe.instance)
        request.step.version = 1 << 62
        request.step.reward_mean = 1e300
        await enemy.heartbeat_once(foe, request)
        await asyncio.sleep(0.5)


async def in_others_names(enemy: Enemy) -> None:
    """Submit groups under guessed lease ids of honest samplers, in their names and in its own."""
    foe = await _sampler(enemy)
    async for lease, *_ in _leases(enemy, foe, wanted=1):
        if lease.purpose is not LeasePurpose.TRAINING:
            continue
        slot, _ = slot_and_attempt(lease.lease_id)
        head = await enemy.head(foe)
        for back, sampler_id in product(range(12), ("sampler-1", "sampler-2", "")):
            group = enemy.group(foe, lease, version=head.number)
            group = replace(group, group_id=f"{max(0, slot - back)}.1")
            await _submit_raw(enemy, foe, replace(group_to_wire(group), sampler_id=sampler_id))


async def unknown_fields(enemy: Enemy) -> None:
    """Submit valid groups with 60 MB in a field that nobody knows."""
    foe, junk = await _sampler(enemy), _field(random.randbytes(UNKNOWN_BYTES))
    async with enemy.heartbeats(foe, ()):
        async for leases in _leases(enemy, foe, wanted=2, pause_s=1.0):
            for lease in leases:
                head = await enemy.head(foe)
                group = group_to_wire(enemy.group(foe, lease, version=head.number))
                await _submit_raw(enemy, foe, replace(group, columns=group.columns + junk))


async def gzip_bombs(enemy: Enemy) -> None:
    """Send zeros that gRPC inflates."""
    foe = await _sampler(enemy)
    # On the wire a stream of one message is a unary call.
    submit: Any = foe.channel.unary_unary("/heterorl.v1.RolloutService/SubmitRollouts")
    bomb = _field(bytes(BOMB_BYTES))
    while True:
        calls = (
            enemy.tried("bombs", submit(bomb, timeout=CALL_TIMEOUT_S, compression=grpc.Compression.Gzip))
            for _ in range(2)
        )
        await asyncio.gather(*calls)
        await asyncio.sleep(0.5)


async def idle_connections(enemy: Enemy) -> None:
    """Hold as many TLS connections to the enrolment port as it takes."""
    async with contextlib.AsyncExitStack() as held:

        async def hold() -> None:
            while True:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        reader, writer = await asyncio.open_connection(*enemy.enrolment, ssl=_anyone())
                    held.callback(writer.close)
                    enemy.did["connections"] += 1
                    while await reader.read(1 << 10):
                        pass
                    enemy.did["connections closed by the hub"] += 1
                await asyncio.sleep(RECONNECT_S)

        await asyncio.gather(*(hold() for _ in range(IDLE_CONNECTIONS)))


async def half_open_calls(enemy: Enemy) -> None:
    """Open calls at the enrolment port that never send their message."""
    identity = enemy.foe(Role.SAMPLER, "sampler-ca").identity
    channels = [
        dial_as_stranger(join_address(*enemy.enrolment), run_id=identity.run_id, ca_pem=identity.ca_pem)
        for _ in range(HALF_OPEN_CHANNELS)
    ]
    calls: list[Any] = []
    try:
        for n in range(HALF_OPEN_CALLS):
            call: Any = channels[n % HALF_OPEN_CHANNELS].stream_unary("/heterorl.v1.EnrolmentService/Enrol")()
            calls.append(call)
            enemy.did["half-open calls"] += 1
            if n % 100 == 0:
                await asyncio.sleep(PAUSE_S)
        await asyncio.Event().wait()
    finally:
        for call in calls:
            call.cancel()
        for channel in channels:
            await channel.close()


async def crawling_clients(enemy: Enemy) -> None:
    """Ask for /metrics a byte every second."""
    port = enemy.stage.ports.telemetry["coordinator"]

    async def crawl() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                enemy.did["clients"] += 1
                try:
                    for byte in b"GET /metrics HTTP/1.1\r\nX-Slow: " + b"x" * 1000:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(1)
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    await asyncio.gather(*(crawl() for _ in range(CRAWLING_CLIENTS)))


async def status_flood(enemy: Enemy) -> None:
    """Ask for the state of the run as fast as it is answered."""
    foe = await _sampler(enemy)

    async def ask(_: int) -> None:
        call = foe.membership.GetStatus(membership_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        await enemy.tried("status", call)

    await _flood(ask, callers=FLOOD_CALLERS, calls_per_s=416)


async def refused_submissions(enemy: Enemy) -> None:
    """Submit groups for leases of others as fast as they are refused."""
    foe, numbers = await _sampler(enemy), count(1)
    header = rollout_pb2.GroupHeader(run_id=enemy.stage.run_id).SerializeToString()

    async def submit(_: int) -> None:
        group = EncodedGroup(header, b"", f"{next(numbers)}.1")
        await enemy.tried("submissions", foe.submissions.submit(group))

    await _flood(submit, callers=FLOOD_CALLERS, calls_per_s=233)


async def lease_storm(enemy: Enemy) -> None:
    """Ask for leases as hundreds of newcomers at once, without a pause."""
    foes = [enemy.foe(Role.SAMPLER, f"sampler-storm-{n}") for n in range(STORM_SAMPLERS)]
    for foe in foes:
        await enemy.join(foe)

    async def ask(number: int) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await enemy.lease(foes[number], 16)

    await _flood(ask, callers=STORM_SAMPLERS, calls_per_s=250)


ATTACKS: Final[Mapping[str, Callable[[Enemy], Awaitable[None]]]] = {
    attack.__name__: attack
    for attack in (
        hoard,
        drop,
        fail_all,
        absurd_size,
        forge_evaluations,
        forge_logprobs,
        absurd_rewards,
        step_report,
        in_others_names,
        unknown_fields,
        gzip_bombs,
        idle_connections,
        half_open_calls,
        crawling_clients,
        status_flood,
        refused_submissions,
        lease_storm,
    )
}


async def _sampler(enemy: Enemy) -> Foe:
    foe = enemy.foe(Role.SAMPLER, "sampler-liar")
    await enemy.join(foe, prompts=CoinTask.prompts)
    return foe


async def _leases(
    enemy: Enemy, foe: Foe, *, wanted: int = 256, pause_s: float = PAUSE_S
) -> AsyncIterator[tuple[PromptLease, ...]]:
    """Yield leases again and again, at least one each time."""
    while True:
        if leases := await enemy.lease(foe, wanted):
            yield leases
        await asyncio.sleep(pause_s)


async def _flood(call: Callable[[int], Awaitable[None]], *, callers: int, calls_per_s: float) -> None:
    """Call as so many callers, numbered from 0; slower if answers are late."""

    async def go_on(number: int) -> None:
        while True:
            await call(number)
            await asyncio.sleep(callers / calls_per_s)

    await asyncio.gather(*map(go_on, range(callers)))


async def _submit_for_ever(enemy: Enemy, *, reward: float | None, purpose: LeasePurpose) -> None:
    foe = await _sampler(enemy)
    client = SamplerRolloutClient(foe.channel)
    async with enemy.heartbeats(foe, ()):
        async for leases in _leases(enemy, foe, wanted=16):
            for lease in leases:
                if lease.purpose is purpose:
                    head = await enemy.head(foe)
                    group = group_to_wire(enemy.group(foe, lease, version=head.number, reward=reward))
                    answer = await enemy.tried("submissions", client.submit(group))
                    if answer is not None:
                        enemy.did[f"submitted: {answer[0]}"] += 1
            unwanted = [lease.lease_id for lease in leases if lease.purpose is not purpose]
            if unwanted:
                request = rollout_pb2.ReleaseLeasesRequest(lease_ids=unwanted)
                await enemy.tried("released", foe.rollouts.ReleaseLeases(request, timeout=CALL_TIMEOUT_S))


async def _submit_raw(enemy: Enemy, foe: Foe, group: EncodedGroup) -> None:
    answer = await enemy.tried("submissions", foe.submissions.submit(group))
    if answer is not None:
        enemy.did[f"submitted: {answer[0]}"] += 1


def _anyone() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the host's CAs, which take 40 ms to load
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _field(content: bytes) -> bytes:
    """Return ``content`` as a field that no message has: number 999, wire type 2, and its length."""
    return _varint(999 << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))
