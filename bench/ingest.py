"""``python -m bench.ingest``: groups a second, and CPU for each, that a coordinator takes in and delivers.

    python -m bench.ingest                          groups of 16 KiB, then of 1 MiB
    python -m bench.ingest --kib 256 --groups 500   of one size

A coordinator runs as a process of its own, with TLS, a ledger and fsync. This process leases, submits from
several samplers at once, and then drains, as a learner would; its own time is not counted as CPU, but shares
the cores. In the same run a bare stream takes the same bytes: gRPC, TLS, and an fsync for all that wait
(``bench.peer_lab.bare_server``), first one group in a message, then as many as samplers join.

rate      groups a second, all of them on disk;   bare_rate      the bare stream's
cpu_ms    CPU a group until it was on disk;       bare_cpu_ms    the bare stream's
deliver_ms  CPU a group to deliver it to a learner
ratio     rate / bare_rate;   joined_ratio     rate / bare_joined_rate, of the bare stream that joins groups
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc.aio
import numpy as np

from bench.peer_lab.bare_server import SUBMIT_ONE, SUBMIT_SEVERAL
from bench.shared.made_groups import made_group
from bench.shared.measured_process import MeasuredProcess, started
from bench.shared.played_run import PlayedRun, join_request
from heterorl.v1 import common_pb2, membership_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from node.clients.rollouts.rollout_client import SamplerRolloutClient
from node.clients.rollouts.submission_stream import SubmissionStream
from node.identity.identity_store import Identity
from node.rpc.channel import Purpose, dial
from node.values.groups.rollout import Completion, EncodedGroup, Finish, PromptLease, RolloutGroup
from node.values.groups.verdict import Verdict
from node.values.limits import GROUPS_PER_REQUEST, JOINED_GROUPS_BYTES
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.wire.rollouts import group_to_wire, submission_to_wire
from sampler.rollouts.group_submitter import SUBMISSIONS_IN_FLIGHT

TIMEOUT_S: Final = 30.0
COMPLETIONS: Final = 8
LEASES: Final = 256
"""In one request, before the clock starts."""
SIZES: Final = ((16, 3000), (1024, 240))
"""KiB of a group, and how many; newcomers are leased no more than some 3000."""
SETTINGS: Final[dict[str, object]] = {
    "prompts": 100_000,
    "group_size": COMPLETIONS,
    "concurrency_groups": 65_536,
    "buffer_groups": 65_536,
    "batch_groups": 1024,
    "buffer_bytes": 4 << 30,
}
"""Settings of the coordinator, which refuses no group for want of room."""
TOKEN_BYTES: Final = 12
"""Token id, logprob and version."""

_LAYOUT, _TOKENIZER = b"l" * 16, b"t" * 16
_VOCABULARY: Final = 32_000


def main() -> None:
    """Measure each size, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kib", type=float, help="size of a group")
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--samplers", type=int, default=4, help="streams that submit at once")
    arguments = parser.parse_args()
    for kib, groups in SIZES if arguments.kib is None else ((arguments.kib, arguments.groups or 500),):
        with tempfile.TemporaryDirectory(prefix="ingest-") as directory:
            measuring = measured(
                Path(directory), kib=kib, groups=arguments.groups or groups, samplers=arguments.samplers
            )
            print(json.dumps(asyncio.run(measuring)))


async def measured(directory: Path, *, kib: float, groups: int, samplers: int) -> dict[str, float]:
    """Measure ``samplers`` that submit ``groups`` of this size, a learner draining them, a bare stream."""
    run = PlayedRun.make(directory / "run")
    tokens = max(1, int(kib * 1024 / TOKEN_BYTES / COMPLETIONS))
    learner = run.own_identity(Role.LEARNER)
    identities = [run.new_identity(Role.SAMPLER, f"sampler-{n}") for n in range(samplers)]
    async with AsyncExitStack() as stack:

        async def dialled(identity: Identity) -> grpc.aio.Channel:
            return await stack.enter_async_context(
                dial(hub.address, identity, purpose=Purpose.ROLLOUTS, now=time.time())
            )

        settings = {f"coordinator.{key}": value for key, value in SETTINGS.items()}
        settings["coordinator.max_new_tokens"] = tokens
        hub = await stack.enter_async_context(run.coordinator(directory / "log", settings))
        learning = await dialled(learner)
        await _join(learning, learner, learner_epoch=1, vocabulary_size=_VOCABULARY)
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(learning)
        drain = stub.DrainRollouts()
        await drain.write(rollout_pb2.DrainRolloutsRequest(hello=rollout_pb2.DrainHello(learner_epoch=1)))
        channels = [await dialled(identity) for identity in identities]
        work = [
            await _leased_groups(channel, identity, groups=groups // samplers, tokens=tokens)
            for channel, identity in zip(channels, identities, strict=True)
        ]
        for channel, (first, *_) in zip(channels, work, strict=True):  # pays for what is made once
            await _submitted(channel, [first])
        taking_in = await _cost(
            hub.process, [_submitted(channel, own[1:]) for channel, own in zip(channels, work, strict=True)]
        )
        n = sum(len(own) - 1 for own in work)
        size_kib = statistics.mean(group.size_bytes for own in work for group in own) / 1024
        await drain.write(
            rollout_pb2.DrainRolloutsRequest(credit=rollout_pb2.DrainCredit(groups=n + samplers))
        )
        delivering = await _cost(hub.process, [_drained(drain, n + samplers)])
        drain.cancel()
    data = [[submission_to_wire(group).SerializeToString() for group in own] for own in work]
    bare, joined = [
        await _bare(run, directory / f"bare-{most}.log", identities, data, most=most)
        for most in (1, GROUPS_PER_REQUEST)
    ]
    return {
        "kib": size_kib,
        "groups": n,
        "samplers": samplers,
        **taking_in.figures("", n),
        "deliver_ms": 1000 * delivering.cpu_s / (n + samplers),
        **bare.figures("bare_", n),
        **joined.figures("bare_joined_", n),
        "ratio": bare.took_s / taking_in.took_s,
        "joined_ratio": joined.took_s / taking_in.took_s,
    }


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    took_s: float

    def figures(self, name: str, groups: int) -> dict[str, float]:
        return {f"{name}rate": groups / self.took_s, f"{name}cpu_ms": 1000 * self.cpu_s / groups}


async def _cost(process: MeasuredProcess, work: Sequence[Coroutine[Any, Any, None]]) -> Cost:
    """Return what a process takes until this work is done."""
    began_s, cpu_s = time.monotonic(), process.cpu_s()
    await asyncio.gather(*work)
    return Cost(process.cpu_s() - cpu_s, time.monotonic() - began_s)


async def _leased_groups(
    channel: grpc.aio.Channel, identity: Identity, *, groups: int, tokens: int
) -> list[EncodedGroup]:
    """Join, lease, and return a submission for each lease."""
    await _join(channel, identity)
    client = SamplerRolloutClient(channel)
    requests: list[EncodedGroup] = []
    while len(requests) <= groups:
        grant = await client.lease(min(LEASES, groups + 1 - len(requests)), PolicyVersion(0))
        assert grant.leases, f"no leases, waits for {grant.waits_for}"
        requests += [group_to_wire(_group(lease, tokens=tokens)) for lease in grant.leases]
    return requests


async def _submitted(channel: grpc.aio.Channel, requests: Sequence[EncodedGroup]) -> None:
    stream = SubmissionStream(channel)
    left = iter(requests)

    async def submit() -> None:
        for request in left:
            verdict, detail = await stream.submit(request)
            assert verdict is Verdict.SPOOLED, detail

    await asyncio.gather(*(submit() for _ in range(SUBMISSIONS_IN_FLIGHT)))
    await stream.close()


async def _drained(drain: Any, groups: int) -> None:
    for _ in range(groups):
        response = await asyncio.wait_for(drain.read(), TIMEOUT_S)
        assert response.HasField("group"), response


async def _bare(
    run: PlayedRun, log: Path, identities: Sequence[Identity], data: Sequence[Sequence[bytes]], *, most: int
) -> Cost:
    """Return what a bare stream takes for the same bytes from the same callers, ``most`` in a message."""
    words = ("-m", "bench.peer_lab.bare_server", "groups", str(run.directory))
    async with started(words, log) as server:
        address = (await server.said("listen"))["listen"]
        await asyncio.gather(
            *(_submitted_bare(address, identities[n], own[:1], most=most) for n, own in enumerate(data))
        )
        return await _cost(
            server,
            [_submitted_bare(address, identities[n], own[1:], most=most) for n, own in enumerate(data)],
        )


async def _submitted_bare(address: str, identity: Identity, groups: Sequence[bytes], *, most: int) -> None:
    """Send groups, as many at once as a sampler; ``most``: how many that wait may share a message."""
    async with dial(address, identity, purpose=Purpose.ROLLOUTS, now=time.time()) as channel:
        submit: Any = channel.stream_stream(SUBMIT_ONE if most == 1 else SUBMIT_SEVERAL)
        call, places, left = submit(), asyncio.Semaphore(SUBMISSIONS_IN_FLIGHT), deque(groups)

        async def answered() -> None:
            answers = 0
            while answers < len(groups):
                answers += (now := len(await call.read()))
                for _ in range(now):
                    places.release()

        answering = asyncio.create_task(answered())
        while left:
            await places.acquire()
            message, size_bytes = [left.popleft()], 0
            while left and len(message) < most and not places.locked():
                size_bytes += len(message[-1])
                if size_bytes + len(left[0]) > JOINED_GROUPS_BYTES:
                    break
                await places.acquire()
                message.append(left.popleft())
            await call.write(message[0] if most == 1 else b"".join((bytes([len(message)]), *message)))
        await answering
        call.cancel()


def _group(lease: PromptLease, *, tokens: int) -> RolloutGroup:
    random = np.random.default_rng(0)
    completion = Completion(
        token_ids=random.integers(0, _VOCABULARY, tokens).astype(np.int32),
        behaviour_logprob=-random.exponential(1.0, tokens).astype(np.float32),
        policy_version=np.zeros(tokens, np.int32),
        reward=1.0,
        finish=Finish.END,
    )
    return made_group(
        lease.lease_id,
        np.arange(64, dtype=np.int32),
        (completion,) * COMPLETIONS,
        lease.sampling,
        now=time.time(),
        layout_digest=_LAYOUT,
        tokenizer_digest=_TOKENIZER,
        task=lease.task,
        prompt_index=lease.prompt_index,
        task_digest=lease.task_digest,
    )


async def _join(channel: Any, identity: Identity, **changes: Any) -> None:
    request = join_request(
        identity.run_id,
        identity.role,
        layout_digest=_LAYOUT,
        tokenizer_digest=_TOKENIZER,
        held=common_pb2.PolicyVersion(),
        **changes,
    )
    stub: Any = membership_pb2_grpc.MembershipServiceStub(channel)
    await stub.Join(request, timeout=TIMEOUT_S)


if __name__ == "__main__":
    main()
