"""A peer's heartbeats: what each one reports, and what the answers say of the run and of the two clocks.

A peer writes a heartbeat only when it has the answer to the one before, so that a heartbeat acknowledges it.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc.aio

from heterorl.v1 import common_pb2, membership_pb2, membership_pb2_grpc
from node.identity.revocation import Revocations
from node.rpc.call_ends import ConnectionLost, classified
from node.system.clock import Clock
from node.telemetry.lag import ClockSample, best_sample, clock_sample
from node.values.evaluation import EvaluationNotice
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import BaseModel, PolicyVersion
from node.values.run import StepReport, Teaching
from node.wire.mapping import from_wire, known, optional_to_wire

ANSWER_TIMEOUT_S: Final = 20.0
"""Longest wait for the answer to a heartbeat. Shorter than a daemon's default time to drain."""

GOODBYE_TIMEOUT_S: Final = 2.0
"""Longest wait for the coordinator to note that the peer leaves; without it the peer turns silent instead."""

LONGEST_PAUSE_S: Final = 300.0
"""Longest pause between two heartbeats that a peer takes from a coordinator."""

FIGURES_EVERY_S: Final = 15.0
"""Time between two reports of a peer's numbers, as often as Prometheus usually scrapes: to take them in costs
the coordinator more than the rest of a heartbeat."""

CLOCK_SAMPLES: Final = 8
"""Heartbeats the clock offset is chosen from: old enough to catch a quiet moment, young enough for drift."""


def pause_s(asked_s: float | None, *, interval_s: float) -> float:
    """Return the pause before the next heartbeat: as the coordinator asked, within what makes sense.

    ``interval_s`` is the run's, which holds where it asked for nothing.
    """
    return interval_s if asked_s is None else min(max(asked_s, interval_s / 2), LONGEST_PAUSE_S)


_Stream = grpc.aio.StreamStreamCall[membership_pb2.HeartbeatRequest, membership_pb2.HeartbeatResponse]


@dataclass(frozen=True, slots=True)
class PeerReports:
    """Sources of what a heartbeat or join reports, asked anew for each.

    All called on the event loop's thread.
    """

    held: Callable[[], PolicyVersion | None]
    """Asked again when an answer says that it must be repaired."""
    waits_for: Callable[[], str]
    machine: Callable[[], MachineFigures | None] = lambda: None
    sampler: Callable[[], SamplerFigures | None] = lambda: None
    """Samplers: numbers of their work."""
    running_leases: Callable[[], Sequence[str]] = tuple
    step_report: Callable[[], StepReport | None] = lambda: None
    teaching: Callable[[], Teaching | None] = lambda: None
    revocations: Callable[[], Revocations | None] = lambda: None
    """Relays: those they have from the coordinator."""
    base: Callable[[], BaseModel] = BaseModel
    """Learners and samplers: version 0, as made from their model directories. Reported at each join."""
    best_version: Callable[[], int | None] = lambda: None
    """Learners: the best version, as written down for ``export --best``."""
    changes: Callable[[], Sequence[str]] = tuple
    """Learners: what an operator has changed lately, a line each, newest first."""
    version_groups: Callable[[], int] = lambda: 0
    """Learners: groups that the next version is made of; 0: a batch."""


@dataclass(frozen=True, slots=True)
class Notices:
    """Listeners to what the answers say; called on the event loop's thread unless said otherwise."""

    verdict: Callable[[GroupVerdict], None] = lambda _: None
    lost_leases: Callable[[Sequence[str]], None] = lambda _: None
    task_changed: Callable[[], None] = lambda: None
    """The run's task, its options or its number of rows are others than before."""
    must_repair: Callable[[], None] = lambda: None
    """The words that the peer holds are not as signed."""
    revocations: Callable[[Revocations], None] = lambda _: None
    """Relays: who is shut out now. Called in a thread: it may write a file."""
    moved: Callable[[bytes], None] = lambda _: None
    """A notice of where the coordinator will be. Called in a thread as well."""


class Heartbeats:
    """Sends heartbeats on one stream after another.

    Attributes:
        clock_offset_s: Coordinator's clock minus this peer's; add it to a local timestamp.
        longest_lag_versions: A learner is told how far the farthest sampler is behind; others: 0.
        evaluations: What a learner is told of them; others: nothing.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        reports: PeerReports,
        notices: Notices,
        *,
        instance: str,
        clock: Clock,
    ) -> None:
        self._stub = membership_pb2_grpc.MembershipServiceStub(channel)
        self._reports = reports
        self._notices = notices
        self._instance = instance
        self._clock = clock
        self._clock_samples: deque[ClockSample] = deque(maxlen=CLOCK_SAMPLES)
        self._figures_sent_s = -math.inf
        self._next_heartbeat_s: float | None = None
        """As the coordinator asked; None: after the run's interval."""
        self._last_verdicts: frozenset[GroupVerdict] = frozenset()
        self.clock_offset_s = 0.0
        self.longest_lag_versions = 0
        self.evaluations = EvaluationNotice()
        self._next_answer = asyncio.Event()

    async def next_answer(self) -> None:
        """Wait for the next answer."""
        await self._next_answer.wait()

    async def send(
        self, *, interval_s: float, stopping: asyncio.Event, answered: Callable[[], Awaitable[None]]
    ) -> None:
        """Send heartbeats on a new stream until ``stopping``, then a last one, and say goodbye.

        Raises RefusedError, ConnectionLost: the stream ended before.
        """
        stream = self._stub.Heartbeat()
        self._next_heartbeat_s, self._figures_sent_s = None, -math.inf
        try:
            with classified():
                sequence = 0
                while not stopping.is_set():
                    sequence += 1
                    await self._send_one(stream, sequence)
                    await answered()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s(self._next_heartbeat_s, interval_s=interval_s)):
                            await stopping.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                        # The status table keeps what it reports: what was made last, and why it ended.
                        await self._send_one(stream, sequence + 1)
                        await stream.done_writing()
                        await stream.read()
        finally:
            stream.cancel()

    async def _send_one(self, stream: _Stream, sequence: int) -> None:
        sent_at_s, held = self._clock.now(), self._reports.held()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await stream.write(self._request(sequence, sent_at_s, held))
                answer = await stream.read()
        except TimeoutError:
            raise ConnectionLost(f"no answer to heartbeat {sequence} within {ANSWER_TIMEOUT_S} s") from None
        if not isinstance(answer, membership_pb2.HeartbeatResponse):  # grpc.aio.EOF
            raise ConnectionLost("the coordinator ended the heartbeat stream")
        self._compare_clocks(sent_at_s, answer)
        self._next_heartbeat_s = answer.next_heartbeat_s if answer.HasField("next_heartbeat_s") else None
        self.longest_lag_versions = max(0, answer.longest_lag_versions)
        self.evaluations = EvaluationNotice(
            best=answer.best_version if answer.HasField("best_version") else None,
            under_way=answer.evaluating_version if answer.HasField("evaluating_version") else None,
            announced=answer.head.number,
            is_evaluated=answer.is_evaluated,
            is_told=True,
        )
        self._next_answer.set()
        self._next_answer = asyncio.Event()
        self._note_verdicts(answer)
        if answer.lost_lease_ids:
            self._notices.lost_leases(tuple(answer.lost_lease_ids))
        # Unless what it reported was repaired or replaced since.
        if answer.must_repair and self._reports.held() == held:
            self._notices.must_repair()
        if answer.moved:
            await asyncio.to_thread(self._notices.moved, answer.moved)
        if answer.HasField("revocations"):
            revocations = from_wire(Revocations, answer.revocations)
            await asyncio.to_thread(self._notices.revocations, revocations)

    def _request(
        self, sequence: int, sent_at_s: float, held: PolicyVersion | None
    ) -> membership_pb2.HeartbeatRequest:
        revocations = self._reports.revocations()
        machine, sampler = self._due_figures()
        return membership_pb2.HeartbeatRequest(
            sequence=sequence,
            sent_at_s=sent_at_s,
            held=optional_to_wire(common_pb2.PolicyVersion, held),
            running_lease_ids=self._reports.running_leases(),
            clock_offset_s=self.clock_offset_s,
            waits_for=self._reports.waits_for(),
            step=optional_to_wire(membership_pb2.StepReport, self._reports.step_report()),
            teaching=optional_to_wire(membership_pb2.Teaching, self._reports.teaching()),
            revocations_digest=b"" if revocations is None else revocations.digest,
            instance=self._instance,
            best_version=self._reports.best_version(),
            changes=self._reports.changes(),
            version_groups=self._reports.version_groups(),
            machine=optional_to_wire(membership_pb2.MachineFigures, machine),
            sampler=optional_to_wire(membership_pb2.SamplerFigures, sampler),
        )

    def _due_figures(self) -> tuple[MachineFigures | None, SamplerFigures | None]:
        """Return the numbers to report now; none where the coordinator has been told lately."""
        now = self._clock.monotonic()
        if now - self._figures_sent_s < FIGURES_EVERY_S:
            return None, None
        self._figures_sent_s = now
        return self._reports.machine(), self._reports.sampler()

    def _compare_clocks(self, sent_at_s: float, answer: membership_pb2.HeartbeatResponse) -> None:
        sample = clock_sample(
            sent_at_s=sent_at_s,
            received_at_s=answer.received_at_s,
            replied_at_s=answer.sent_at_s,
            returned_at_s=self._clock.now(),
        )
        self._clock_samples.append(sample)
        if (best := best_sample(self._clock_samples)) is not None:
            self.clock_offset_s = best.offset_s

    def _note_verdicts(self, answer: membership_pb2.HeartbeatResponse) -> None:
        told = known(Verdict, answer.verdicts, "verdict")
        verdicts = [from_wire(GroupVerdict, verdict) for verdict in told]
        for verdict in verdicts:
            # The coordinator repeats them where it cannot know that the answer before arrived.
            if verdict not in self._last_verdicts:
                self._notices.verdict(verdict)
        self._last_verdicts = frozenset(verdicts)
