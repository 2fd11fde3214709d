"""A peer's half of MembershipService: join, send heartbeats, and begin again for ever as the same peer.

joining --settings--> heartbeats --connection lost, not_joined, coordinator restarted--> joining
   |                     |
   +--- a final refusal: raised, the daemon ends --+
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from node.clients.membership.heartbeats import Heartbeats, Notices, PeerReports
from node.clients.membership.join_call import JoinCall, Member, OwnTask
from node.errors import Reason, Recovery, RefusedError
from node.identity.identity_store import Identity
from node.identity.own_identity import OwnIdentity
from node.rpc.call_ends import ConnectionLost
from node.rpc.clock_comparison import compare_clocks
from node.rpc.hub import Hub
from node.system.backoff import Backoff
from node.system.clock import Clock
from node.system.waits import run_until
from node.values.run import RunSettings

logger = logging.getLogger(__name__)


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
        self._task_changed = notices.task_changed
        self._clock, self._backoff, self._waiting = uplink.clock, uplink.backoff, uplink.waiting
        self._identity, self._hub = uplink.identity, uplink.hub
        instance = secrets.token_hex(8)
        self.heartbeats = Heartbeats(channel, reports, notices, instance=instance, clock=uplink.clock)
        """Their answers say how the run goes on."""
        self._join_call = JoinCall(
            channel,
            member,
            reports=reports,
            moved=notices.moved,
            instance=instance,
            clock=uplink.clock,
            identity=uplink.identity,
            hub=uplink.hub,
        )
        self._settings: RunSettings | None = None
        self._joined = asyncio.Event()
        self._joins = 0

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
    def task_digest(self) -> bytes | None:
        """Digest of the options by which groups are graded now; None before the peer has joined."""
        return None if self._settings is None else self._settings.task_digest

    async def tell_task(self, task: OwnTask) -> None:
        """Report what the run's task is here, now and at every later join.

        Raises RefusedError: For a reason after which a peer stops: the run's task has another number, or its
        base model, which is known by now, other words.
        """
        self._join_call.task = task
        backoff = self._backoff.another()
        while True:
            try:
                _warn_of_other_grader(await self._join_call.settings(), task.grader_digest)
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
                    await self.heartbeats.send(
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
        try:
            await self._join_call.renew_if_due()
        except (RefusedError, ConnectionLost) as error:
            _log(error)

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
        settings = await self._join_call.settings()
        before, self._settings = self._settings, settings
        if before is not None and _task(before) != _task(settings):
            logger.warning("the run's task was changed", extra={"task": settings.task})
            self._task_changed()
        self._joins += 1
        if not self._joined.is_set():
            self._joined.set()
            ready()
        logger.info("joined", extra={"task": self._settings.task, "joins": self._joins})


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
