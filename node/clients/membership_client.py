"""A peer's half of MembershipService: join, send heartbeats, and begin again for ever as the same peer.

joining --settings--> heartbeats --connection lost, not_joined, coordinator restarted--> joining
   |                     |
   +--- a final refusal: raised, the daemon ends --+
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc.aio

from heterorl.v1 import common_pb2, membership_pb2, membership_pb2_grpc
from node.clients.heartbeats import Heartbeats, Notices, PeerReports
from node.errors import Reason, Recovery, RefusedError
from node.identity.identity_store import Identity
from node.identity.own_identity import OwnIdentity
from node.rpc.channel import Backoff, ConnectionLost, call
from node.rpc.clock_comparison import compare_clocks
from node.rpc.hub import Hub
from node.system.clock import Clock, moment
from node.system.waits import run_until
from node.values.evaluation import EvaluationNotice
from node.values.policy import PolicyVersion
from node.values.protocol import OURS, UNNUMBERED, check_common
from node.values.run import Role, RunSettings
from node.wire.mapping import from_wire, optional_to_wire, to_wire
from node.wire.members import spoken_from_wire

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S: Final = 15.0

RENEWAL_RETRY_S: Final = 3600.0
"""Longest pause after a renewal that brought no certificate: the authority's key may be kept elsewhere."""

RENEWAL_RETRY_PART: Final = 0.1
"""The same as a part of the time that is left to the certificate, for short ones."""


@dataclass(frozen=True, slots=True)
class Member:
    """The member that joins; fields as in membership.proto."""

    run_id: str
    role: Role
    layout_digest: bytes = b""
    tokenizer_digest: bytes = b""
    chat_template_digest: bytes = b""
    learner_epoch: int = 0
    vocabulary_size: int = 0
    layout_summary: str = ""
    context_tokens: int = 0
    text_digest: bytes = b""
    text_summary: str = ""


@dataclass(frozen=True, slots=True)
class Uplink:
    """How a peer reaches its hub, and how it waits between two tries."""

    clock: Clock
    backoff: Backoff
    waiting: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Counts a wait under its name, as ``NodeMetrics.waiting``."""
    identity: Identity | OwnIdentity | None = None
    """The peer's, which is renewed in time; its dates are compared with the clocks. None: TLS is off."""
    hub: Hub | None = None
    """Where the peer's channels lead; it moves on to the next one from one that does not serve."""


class MembershipClient:
    """A service that keeps this peer a member of its run; ready once it has joined."""

    name = "membership"

    def __init__(
        self,
        channel: grpc.aio.Channel,
        member: Member,
        uplink: Uplink,
        *,
        reports: PeerReports,
        notices: Notices,
    ) -> None:
        """Prepare; nothing is dialled before ``run``."""
        self._stub = membership_pb2_grpc.MembershipServiceStub(channel)
        self._member = member
        self._held = reports.held
        self._base = reports.base
        self._task_changed = notices.task_changed
        self._moved = notices.moved
        self._clock, self._backoff, self._waiting = uplink.clock, uplink.backoff, uplink.waiting
        self._identity, self._hub = uplink.identity, uplink.hub
        self._instance = secrets.token_hex(8)
        self._heartbeats = Heartbeats(channel, reports, notices, instance=self._instance, clock=uplink.clock)
        self._settings: RunSettings | None = None
        self._joined = asyncio.Event()
        self._joins = 0
        self._next_renewal_s = -math.inf
        self._prompts = 0
        self._task_digest = b""
        self._grader_digest = b""

    async def settings(self) -> RunSettings:
        """Wait until the peer has joined; return the run's settings."""
        await self._joined.wait()
        assert self._settings is not None
        return self._settings

    @property
    def group_bytes(self) -> int | None:
        """Size of the largest group of the run; None before the peer has joined."""
        return None if self._settings is None else self._settings.group_bytes

    @property
    def clock_offset_s(self) -> float:
        """Coordinator's clock minus this peer's; add it to a local timestamp."""
        return self._heartbeats.clock_offset_s

    @property
    def longest_lag_versions(self) -> int:
        """How far the farthest sampler is behind, as a learner is told; others: 0."""
        return self._heartbeats.longest_lag_versions

    @property
    def evaluations(self) -> EvaluationNotice:
        """Latest notice to a learner."""
        return self._heartbeats.evaluations

    async def next_answer(self) -> None:
        """Wait for the next answer to a heartbeat."""
        await self._heartbeats.next_answer()

    @property
    def task_digest(self) -> bytes | None:
        """Digest of the options by which groups are graded now; None before the peer has joined."""
        return None if self._settings is None else self._settings.task_digest

    async def tell_task(self, prompts: int, *, task_digest: bytes, grader_digest: bytes) -> None:
        """Report what the task of this digest is here, now and at every later join.

        Args:
            prompts: How many it has; 0: that is for samplers to say.
            grader_digest: Of the code that grades.

        Raises RefusedError: For a reason after which a peer stops: the run's task has another number, or its
        base model, which is known by now, other words.
        """
        self._prompts, self._task_digest, self._grader_digest = prompts, task_digest, grader_digest
        backoff = self._backoff.another()
        while True:
            try:
                _warn_of_other_grader(await self._call_join(), grader_digest)
                return
            except (RefusedError, ConnectionLost) as error:
                if _is_final(error):
                    raise
                self._look_elsewhere(error)
                _log(error)
            with self._waiting("hub"):
                await backoff.wait()

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        """Stay a member until ``stopping``, then leave.

        Raises RefusedError: For a reason after which a peer stops. EXPIRED, if this peer's certificate has
        expired by the coordinator's clock and by its own. NAME_IN_USE, once it has joined: another process of
        this name came while it was cut off, and two that replaced each other would go on for ever. At its
        first join it waits for the other to go.
        """
        while not stopping.is_set():
            wait: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
            try:
                await run_until(stopping, self._join(ready))
                if self._settings is not None and not stopping.is_set():
                    await self._heartbeats.send(
                        interval_s=self._settings.heartbeat_interval_s,
                        stopping=stopping,
                        answered=self._note_answer,
                    )
            except (RefusedError, ConnectionLost) as error:
                is_displaced = isinstance(error, RefusedError) and error.reason is Reason.NAME_IN_USE
                if _is_final(error) or (is_displaced and self._joins > 0):
                    raise
                self._look_elsewhere(error)
                wait = self._wait_after(error)
            with wait:
                await self._backoff.wait(stopping)

    async def _note_answer(self) -> None:
        self._backoff.reset()
        await self._renew_if_due()

    async def _renew_if_due(self) -> None:
        """Join once more where this peer's certificate is late in its time; the answer has the next one."""
        identity, now = self._identity, self._clock.now()
        if not isinstance(identity, OwnIdentity) or not identity.is_due(now):
            return
        if self._clock.monotonic() < self._next_renewal_s:
            return
        left_s = max(0.0, identity.current.not_after_s - now)
        self._next_renewal_s = self._clock.monotonic() + min(RENEWAL_RETRY_S, RENEWAL_RETRY_PART * left_s)
        try:
            await self._call_join()
        except (RefusedError, ConnectionLost) as error:
            _log(error)

    def _take_certificate(self, certificate_pem: bytes) -> None:
        identity = self._identity
        if not certificate_pem or not isinstance(identity, OwnIdentity):
            return
        try:
            identity.renew(certificate_pem)
        except (RefusedError, OSError) as error:
            logger.error("certificate not renewed", extra={"detail": str(error)})
            return
        logger.info("certificate renewed", extra={"until": moment(identity.current.not_after_s)})

    def _look_elsewhere(self, error: RefusedError | ConnectionLost) -> None:
        if self._hub is not None:
            self._hub.move_on_after(error)

    def _wait_after(self, error: RefusedError | ConnectionLost) -> contextlib.AbstractContextManager[object]:
        """Log a failure; return a wait for the next attempt, which has a name where a clock is wrong.

        Raises RefusedError: EXPIRED; both clocks agree that the certificate has.
        """
        identity = None if self._identity is None else self._identity.current
        finding = compare_clocks(error, identity, now=self._clock.now())
        if finding is not None and finding.has_expired:
            raise RefusedError(Reason.EXPIRED, finding.what, fix=finding.fix) from error
        if finding is None or finding.waits_for is None:
            _log(error, detail=finding or error)
            return contextlib.nullcontext()
        logger.warning(
            "clocks disagree", extra={"waits_for": finding.waits_for.value, "detail": str(finding)}
        )
        return self._waiting(finding.waits_for.value)

    async def _join(self, ready: Callable[[], None]) -> None:
        settings = await self._call_join()
        before, self._settings = self._settings, settings
        if before is not None and _task(before) != _task(settings):
            logger.warning("the run's task was changed", extra={"task": settings.task})
            self._task_changed()
        self._joins += 1
        if not self._joined.is_set():
            self._joined.set()
            ready()
        logger.info("joined", extra={"task": self._settings.task, "joins": self._joins})

    async def _call_join(self) -> RunSettings:
        """Join; once more with every refusal of a version that this peer has left while the call ran."""
        while True:
            held = self._held()
            try:
                return await self._call_join_with(held)
            except RefusedError as refused:
                # Steps are told on another stream, which may overtake this call.
                if refused.reason is not Reason.ROLLBACK or self._held() == held:
                    raise
                logger.info("joining again with a newer version", extra={"detail": str(refused)})

    async def _call_join_with(self, held: PolicyVersion | None) -> RunSettings:
        base = self._base()
        request = to_wire(
            membership_pb2.JoinRequest,
            self._member,
            **dataclasses.asdict(OURS),
            held=optional_to_wire(common_pb2.PolicyVersion, held),
            instance=self._instance,
            prompts=self._prompts,
            base_root=base.root,
            base_parts=base.parts,
            base_part_names=base.part_names,
            task_digest=self._task_digest,
            grader_digest=self._grader_digest,
        )
        response = await call(self._stub.Join, request, timeout_s=JOIN_TIMEOUT_S)
        self._take_certificate(response.certificate)
        if response.moved:
            await asyncio.to_thread(self._moved, response.moved)
        spoken = spoken_from_wire(response)
        if spoken.protocol == UNNUMBERED:
            where = "" if self._hub is None else f" at {self._hub.address}"
            raise RefusedError(
                Reason.PROTOCOL_MISMATCH,
                f"a relay of release 0.3, which carries samplers, or a coordinator of 0.2 answers{where}",
                fix="upgrade it: relays pass samplers' connections on since 0.4",
            )
        check_common(OURS, spoken, peer_name=f"this {self._member.role}")
        return from_wire(RunSettings, response)


def _task(settings: RunSettings) -> tuple[bytes, int]:
    return settings.task_digest, settings.prompts


def _warn_of_other_grader(settings: RunSettings, grader_digest: bytes) -> None:
    if grader_digest and settings.grader_digest not in (b"", grader_digest):
        logger.warning(
            "this peer's grader code is not the run's; it gets no leases and no checks",
            extra={
                "digest": grader_digest.hex(),
                "run_digest": settings.grader_digest.hex(),
                "said_by": settings.grader_said_by,
                "fix": "install the same grader here, or set coordinator.grader_digest to this digest",
            },
        )


def _is_final(error: RefusedError | ConnectionLost) -> bool:
    return isinstance(error, RefusedError) and error.reason.recovery is Recovery.STOP


def _log(error: RefusedError | ConnectionLost, *, detail: object = None) -> None:
    if isinstance(error, RefusedError):
        logger.warning("membership refused", extra={"reason": error.reason.value, "detail": str(error)})
    else:
        logger.warning("connection to the coordinator lost", extra={"detail": str(detail or error)})
