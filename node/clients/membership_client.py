"""A peer's half of MembershipService: join, heartbeat, and begin again for ever with the same identity.

    joining --settings--> beating --connection lost, not_joined, hub restarted--> joining
       |                     |
       +--- a final refusal: raised, the daemon ends --+

Each heartbeat says what the peer holds and works on; each answer brings the head, verdicts and lost
leases, and compares the two clocks.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import grpc.aio

from heterorl.v1 import membership_pb2, membership_pb2_grpc
from node.clock import Clock
from node.errors import Reason, Recovery, RefusedError
from node.identity.revocation import Revocations
from node.policy import PolicyVersion
from node.rollout import GroupVerdict
from node.rpc.channel import Backoff, ConnectionLost, call, classified
from node.rpc.clock_comparison import ClockComparison
from node.run import Role, RunSettings, StepReport
from node.telemetry.lag import ClockSample, best_sample, clock_sample
from node.telemetry.metrics import MetricFamily
from node.waits import run_until
from node.wire import (
    metric_families_to_wire,
    policy_version_from_wire,
    policy_version_to_wire,
    revocations_from_wire,
    role_to_wire,
    settings_from_wire,
    step_report_to_wire,
    verdict_from_wire,
)

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S: Final = 15.0

ANSWER_TIMEOUT_S: Final = 20.0
"""Longest wait for the answer to a heartbeat. Shorter than a daemon's default time to drain."""

FAREWELL_TIMEOUT_S: Final = 2.0
"""Longest wait for the hub to note that the peer leaves; without it the peer turns silent instead."""

CLOCK_SAMPLES: Final = 8
"""Heartbeats the clock offset is chosen from: old enough to catch a quiet moment, young enough for drift."""

_Heartbeats = grpc.aio.StreamStreamCall[membership_pb2.HeartbeatRequest, membership_pb2.HeartbeatResponse]


@dataclass(frozen=True, slots=True)
class Member:
    """Who joins; fields as in membership.proto."""

    run_id: str
    role: Role
    layout_digest: bytes
    tokenizer_digest: bytes
    learner_epoch: int = 0
    vocabulary_size: int = 0


@dataclass(frozen=True, slots=True)
class PeerState:
    """What each heartbeat says of the peer, asked anew for each; all called on the event loop's thread."""

    held: Callable[[], PolicyVersion | None]
    waits_for: Callable[[], str]
    metrics: Callable[[], tuple[MetricFamily, ...]]
    running_leases: Callable[[], Sequence[str]] = tuple
    step_report: Callable[[], StepReport | None] = lambda: None
    revocations: Callable[[], Revocations | None] = lambda: None
    """Relays: those they have from the coordinator."""


@dataclass(frozen=True, slots=True)
class Notices:
    """Whom to tell what the hub says; called on the event loop's thread unless said otherwise."""

    verdict: Callable[[GroupVerdict], None] = lambda _: None
    lost_leases: Callable[[Sequence[str]], None] = lambda _: None
    must_repair: Callable[[], None] = lambda: None
    revocations: Callable[[Revocations], None] = lambda _: None
    """Relays: who is shut out now. Called in a thread: it may write a file."""


class MembershipClient:
    """A service that keeps this peer a member of its run; ready once it has joined.

    Attributes:
        head: The newest announced version the hub has told of.
        clock_offset_s: Coordinator's clock minus this peer's; add it to a local timestamp.
        joins: Times joined.
        longest_lag_versions: A learner is told how far the farthest sampler is behind; others: 0.
    """

    name = "membership"

    def __init__(
        self,
        channel: grpc.aio.Channel,
        member: Member,
        *,
        state: PeerState,
        notices: Notices,
        clock: Clock,
        backoff: Backoff,
        waiting: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        comparison: ClockComparison | None = None,
    ) -> None:
        """Prepare; nothing is dialled before ``run``.

        Args:
            channel: to the coordinator, for control.
            member: who joins.
            state: asked for each heartbeat.
            notices: told what the answers say.
            clock: this machine's.
            backoff: between two attempts to join.
            waiting: counts a wait under its name, as ``NodeMetrics.waiting``.
            comparison: with the coordinator's clock; None where TLS is off: nothing expires.
        """
        self._stub = membership_pb2_grpc.MembershipServiceStub(channel)
        self._member = member
        self._state = state
        self._notices = notices
        self._clock = clock
        self._backoff = backoff
        self._instance = secrets.token_hex(8)
        self._waiting = waiting
        self._comparison = comparison
        self._settings: RunSettings | None = None
        self._joined = asyncio.Event()
        self._clock_samples: deque[ClockSample] = deque(maxlen=CLOCK_SAMPLES)
        self._last_verdicts: frozenset[GroupVerdict] = frozenset()
        self.head: PolicyVersion | None = None
        self.clock_offset_s = 0.0
        self.joins = 0
        self.longest_lag_versions = 0
        self._prompts = 0

    async def settings(self) -> RunSettings:
        """Wait until the peer has joined and give what the run is like."""
        await self._joined.wait()
        assert self._settings is not None
        return self._settings

    @property
    def max_staleness_versions(self) -> int | None:
        """The run's staleness bound; None before the peer has joined."""
        return None if self._settings is None else self._settings.max_staleness_versions

    async def tell_prompts(self, prompts: int) -> None:
        """Say how many prompts the run's task has here, now and at every join to come.

        Raises:
            RefusedError: for a reason after which a peer stops: the run's task has another number.
        """
        self._prompts = prompts
        backoff = self._backoff.another()
        while True:
            try:
                await self._call_join()
            except RefusedError as refused:
                if refused.reason.recovery is Recovery.STOP:
                    raise
                logger.warning(
                    "membership refused", extra={"reason": refused.reason.value, "detail": str(refused)}
                )
            except ConnectionLost as lost:
                logger.warning("connection to the hub lost", extra={"detail": str(lost)})
            else:
                return
            await backoff.wait()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Stay a member until ``stopping``, then say so.

        Raises:
            RefusedError: for a reason after which a peer stops; EXPIRED, if this peer's certificate has
                expired by the coordinator's clock and by its own; NAME_IN_USE, once it has joined: another
                process of this name came while it was cut off. Two that replaced each other would go on for
                ever. At its first join it waits for the other to go.
        """
        while not stopping.is_set():
            try:
                await run_until(stopping, self._join(ready))
                await self._heartbeat_until_lost(stopping)
            except RefusedError as refused:
                is_replaced = refused.reason is Reason.NAME_IN_USE and self.joins
                if refused.reason.recovery is Recovery.STOP or is_replaced:
                    raise
                if await self._waits_for_a_clock(refused, stopping):
                    continue
                logger.warning(
                    "membership refused", extra={"reason": refused.reason.value, "detail": str(refused)}
                )
            except ConnectionLost as lost:
                if await self._waits_for_a_clock(lost, stopping):
                    continue
                logger.warning("connection to the hub lost", extra={"detail": str(lost)})
            await self._backoff.wait(stopping)

    async def _waits_for_a_clock(self, error: RefusedError | ConnectionLost, stopping: asyncio.Event) -> bool:
        """Wait for the next attempt under the name of the clock that is wrong; False: it is not a clock.

        Raises:
            RefusedError: EXPIRED; both clocks agree that the certificate has.
        """
        if self._comparison is None or stopping.is_set():
            return False
        finding = await self._comparison.after(error)
        if finding is None:
            return False
        if finding.waits_for is None:
            raise RefusedError(Reason.EXPIRED, finding.what, fix=finding.fix) from error
        logger.warning(
            "clocks disagree", extra={"waits_for": finding.waits_for.value, "detail": str(finding)}
        )
        with self._waiting(finding.waits_for.value):
            await self._backoff.wait(stopping)
        return True

    async def _join(self, ready: Callable[[], None]) -> None:
        self._settings = await self._call_join()
        self.head = self._settings.head or self.head
        self.joins += 1
        if not self._joined.is_set():
            self._joined.set()
            ready()
        logger.info("joined", extra={"task": self._settings.task, "joins": self.joins})

    async def _call_join(self) -> RunSettings:
        held = self._state.held()
        request = membership_pb2.JoinRequest(
            run_id=self._member.run_id,
            role=role_to_wire(self._member.role),
            software_version=version("heterorl-node"),
            layout_digest=self._member.layout_digest,
            tokenizer_digest=self._member.tokenizer_digest,
            learner_epoch=self._member.learner_epoch,
            held=None if held is None else policy_version_to_wire(held),
            vocabulary_size=self._member.vocabulary_size,
            instance=self._instance,
            prompts=self._prompts,
        )
        return settings_from_wire(await call(self._stub.Join, request, timeout_s=JOIN_TIMEOUT_S))

    async def _heartbeat_until_lost(self, stopping: asyncio.Event) -> None:
        if self._settings is None or stopping.is_set():
            return
        interval_s = self._settings.heartbeat_interval_s
        heartbeats = self._stub.Heartbeat()
        try:
            with classified():
                sequence = 0
                while not stopping.is_set():
                    sequence += 1
                    await self._heartbeat(heartbeats, sequence)
                    self._backoff.reset()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(interval_s):
                            await stopping.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                        await heartbeats.done_writing()
                        await heartbeats.read()
        finally:
            heartbeats.cancel()

    async def _heartbeat(self, heartbeats: _Heartbeats, sequence: int) -> None:
        sent_at_s = self._clock.now()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await heartbeats.write(self._request(sequence, sent_at_s))
                answer = await heartbeats.read()
        except TimeoutError:
            raise ConnectionLost(f"no answer to beat {sequence} within {ANSWER_TIMEOUT_S} s") from None
        if not isinstance(answer, membership_pb2.HeartbeatResponse):
            raise ConnectionLost("the hub ended the heartbeat stream")
        self._compare_clocks(sent_at_s, answer)
        if answer.HasField("head"):
            self.head = policy_version_from_wire(answer.head)
        self.longest_lag_versions = max(0, answer.longest_lag_versions)
        self._take_verdicts(answer)
        if answer.lost_lease_ids:
            self._notices.lost_leases(tuple(answer.lost_lease_ids))
        if answer.must_repair:
            self._notices.must_repair()
        if answer.HasField("revocations"):
            await asyncio.to_thread(self._notices.revocations, revocations_from_wire(answer.revocations))

    def _take_verdicts(self, answer: membership_pb2.HeartbeatResponse) -> None:
        verdicts = [
            GroupVerdict(verdict.group_id, verdict_from_wire(verdict.verdict), verdict.detail)
            for verdict in answer.verdicts
        ]
        for verdict in verdicts:
            # The hub tells them again where it cannot know that the answer before arrived.
            if verdict not in self._last_verdicts:
                self._notices.verdict(verdict)
        self._last_verdicts = frozenset(verdicts)

    def _request(self, sequence: int, sent_at_s: float) -> membership_pb2.HeartbeatRequest:
        held = self._state.held()
        step = self._state.step_report()
        revocations = self._state.revocations()
        return membership_pb2.HeartbeatRequest(
            sequence=sequence,
            sent_at_s=sent_at_s,
            held=None if held is None else policy_version_to_wire(held),
            running_lease_ids=self._state.running_leases(),
            clock_offset_s=self.clock_offset_s,
            metrics=metric_families_to_wire(self._state.metrics()),
            waits_for=self._state.waits_for(),
            step=None if step is None else step_report_to_wire(step),
            revocations_digest=b"" if revocations is None else revocations.digest,
            instance=self._instance,
        )

    def _compare_clocks(self, sent_at_s: float, answer: membership_pb2.HeartbeatResponse) -> None:
        self._clock_samples.append(
            clock_sample(
                sent_at_s=sent_at_s,
                received_at_s=answer.received_at_s,
                replied_at_s=answer.sent_at_s,
                returned_at_s=self._clock.now(),
            )
        )
        best = best_sample(self._clock_samples)
        if best is not None:
            self.clock_offset_s = best.offset_s
