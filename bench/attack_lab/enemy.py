"""Members that turned on their run: real certificates, real calls, no honesty."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import grpc.aio
import numpy as np
from tokenizers import Tokenizer

from bench.attack_lab.stage import GROUP_SIZE, TASK, Stage
from bench.attack_lab.task import CoinTask
from bench.shared.made_groups import made_group
from bench.shared.played_run import PlayedRun, join_request
from heterorl.v1 import membership_pb2, membership_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from node.clients.rollouts.submission_stream import SubmissionStream
from node.errors import RefusedError
from node.identity.identity_store import Identity
from node.rpc.call_ends import ConnectionLost
from node.rpc.channel import Purpose, dial
from node.values.groups.rollout import Completion, Finish, LeaseGrant, PromptLease, RolloutGroup
from node.values.roles import Role
from node.wire.mapping import from_wire

CALL_TIMEOUT_S: Final = 15.0

HEAD_AGE_S: Final = 1.0
"""How often attackers ask which version is the newest: a status storm is an attack of its own."""

_CLAIMED: Final = ("layout_digest", "tokenizer_digest", "chat_template_digest", "base_root", "base_parts")
"""Fields of the learner's Join, which every member of a run knows."""


@dataclass(slots=True)
class Foe:
    """One certified member under the attacker's control."""

    identity: Identity
    channel: grpc.aio.Channel
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    grader_digest: bytes = b""
    _submissions: SubmissionStream | None = None

    @property
    def submissions(self) -> SubmissionStream:
        """The one stream it submits on."""
        self._submissions = self._submissions or SubmissionStream(self.channel)
        return self._submissions

    async def close(self) -> None:
        """End what it submits, and its connections."""
        if self._submissions is not None:
            await self._submissions.close()
        await self.channel.close()

    @property
    def rollouts(self) -> "rollout_pb2_grpc.RolloutServiceAsyncStub":
        return rollout_pb2_grpc.RolloutServiceStub(self.channel)

    @property
    def membership(self) -> "membership_pb2_grpc.MembershipServiceAsyncStub":
        return membership_pb2_grpc.MembershipServiceStub(self.channel)


class Enemy:
    """Means of an attack: certificates of the run, its addresses, and a count of its deeds."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.did: Counter[str] = Counter()
        """Calls that got through and refusals, by name."""
        self._head: tuple[float, Any] = (-HEAD_AGE_S, None)
        self._run = PlayedRun(stage.directory.coordinator_state)
        self._closing = contextlib.AsyncExitStack()

    @property
    def enrolment(self) -> tuple[str, int]:
        return "127.0.0.1", self.stage.ports.enrolment

    @cached_property
    def model(self) -> Any:
        """The run's model, as its learner described it."""
        return self.stage.learner()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(Path(self.stage.directory.model) / "tokenizer.json"))

    async def close(self) -> None:
        """Close every channel."""
        await self._closing.aclose()

    def foe(self, role: Role, node_id: str) -> Foe:
        """Certify one more member and dial the coordinator as it."""
        identity = self._run.new_identity(role, node_id)
        members = f"127.0.0.1:{self.stage.ports.members}"
        channel = dial(members, identity, purpose=Purpose.ROLLOUTS, now=time.time())
        foe = Foe(identity, channel)
        self._closing.push_async_callback(foe.close)
        return foe

    async def tried(self, name: str, call: Any) -> Any:
        """Await a call; count its answer or refusal under ``name``; None where it was refused."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            self.did[f"{name}: {error.code().name.lower()}"] += 1
            return None
        except (RefusedError, ConnectionLost) as error:
            self.did[f"{name}: {getattr(error, 'reason', 'lost')}"] += 1
            return None
        self.did[name] += 1
        return answer

    async def join(self, foe: Foe, *, prompts: int = CoinTask.prompts) -> None:
        """Join as a sampler or relay that claims the run's model, task and grader."""
        request = join_request(foe.identity.run_id, foe.identity.role, instance=foe.instance)
        if foe.identity.role is Role.SAMPLER:
            for name in _CLAIMED:
                setattr(request, name, getattr(self.model, name))
        answer = await self.tried("joined", foe.membership.Join(request, timeout=CALL_TIMEOUT_S))
        if answer is None or foe.identity.role is not Role.SAMPLER:
            return
        foe.grader_digest = answer.grader_digest
        request.prompts = prompts
        request.task_digest, request.grader_digest = answer.task_digest, answer.grader_digest
        await self.tried("joined with prompts", foe.membership.Join(request, timeout=CALL_TIMEOUT_S))

    async def lease(self, foe: Foe, wanted: int = 256) -> tuple[PromptLease, ...]:
        """Lease as much as there is, claiming the newest version."""
        if time.monotonic() - self._head[0] >= HEAD_AGE_S:
            self._head = (time.monotonic(), await self.head(foe))
        request = rollout_pb2.LeasePromptsRequest(max_leases=wanted, stays=True)
        request.held.CopyFrom(self._head[1])
        answer = await self.tried("lease calls", foe.rollouts.LeasePrompts(request, timeout=CALL_TIMEOUT_S))
        leases = () if answer is None else from_wire(LeaseGrant, answer).leases
        self.did["leased"] += len(leases)
        return leases

    async def head(self, foe: Foe) -> Any:
        """Return the newest announced version."""
        answer = await foe.membership.GetStatus(membership_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        return answer.head

    @contextlib.asynccontextmanager
    async def heartbeats(self, foe: Foe, leases: Iterable[str]) -> AsyncIterator[None]:
        """Send heartbeats that name ``leases``, a growing list, while the body runs."""
        sending = asyncio.create_task(self._send_heartbeats(foe, leases))
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.wait({sending})

    async def heartbeat_once(self, foe: Foe, request: membership_pb2.HeartbeatRequest) -> None:
        """Send one heartbeat on a stream of its own."""

        async def exchange() -> None:
            stream = foe.membership.Heartbeat()
            try:
                await stream.write(request)
                await stream.read()
                if stream.done():
                    await stream.code()
            finally:
                stream.cancel()

        await self.tried("heartbeats", exchange())

    def group(
        self,
        foe: Foe,
        lease: PromptLease,
        *,
        version: int,
        reward: float | None = None,
    ) -> RolloutGroup:
        """Return a well-formed group of random tokens for a lease."""
        draw = np.random.default_rng(abs(hash(lease.lease_id)))

        def completion(number: int) -> Completion:
            tokens = int(draw.integers(1, lease.sampling.max_new_tokens + 1))
            return Completion(
                token_ids=draw.integers(2, self.model.vocabulary_size, tokens).astype(np.int32),
                behaviour_logprob=np.full(tokens, -0.5, np.float32),
                policy_version=np.full(tokens, version, np.int32),
                reward=float(number % 2) if reward is None else reward,
                finish=Finish.LENGTH if tokens == lease.sampling.max_new_tokens else Finish.END,
            )

        prompt = CoinTask().prompt(lease.prompt_index, None)
        return made_group(
            lease.lease_id,
            np.array(self._tokenizer.encode(prompt).ids, np.int32),
            tuple(map(completion, range(lease.group_size or GROUP_SIZE))),
            lease.sampling,
            now=time.time(),
            run_id=self.stage.run_id,
            layout_digest=self.model.layout_digest,
            tokenizer_digest=self.model.tokenizer_digest,
            task=TASK,
            prompt_index=lease.prompt_index,
            task_digest=lease.task_digest,
            grader_digest=foe.grader_digest,
        )

    async def _send_heartbeats(self, foe: Foe, leases: Iterable[str]) -> None:
        while True:
            stream = foe.membership.Heartbeat()
            sequence = 0
            try:
                while True:
                    sequence += 1
                    request = membership_pb2.HeartbeatRequest(
                        sequence=sequence,
                        sent_at_s=time.time(),
                        instance=foe.instance,
                        running_lease_ids=list(leases)[-4096:],
                    )
                    request.held.CopyFrom(await self.head(foe))
                    await stream.write(request)
                    if await stream.read() is grpc.aio.EOF:
                        break
                    self.did["heartbeats"] += 1
                    await asyncio.sleep(0.5)
            except grpc.aio.AioRpcError as error:
                self.did[f"heartbeats: {error.code().name.lower()}"] += 1
            finally:
                stream.cancel()
            await asyncio.sleep(0.5)
