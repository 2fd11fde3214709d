"""A peer's Join: what it says of itself and of its task, and what the answer brings.

answer --> the run's settings; the peer's next certificate; where the coordinator will be
"""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio

from heterorl.v1 import common_pb2, membership_pb2, membership_pb2_grpc
from node.clients.membership.heartbeats import PeerReports
from node.errors import Reason, RefusedError
from node.identity.identity_store import Identity
from node.identity.own_identity import OwnIdentity
from node.rpc.call_ends import call
from node.rpc.hub import Hub
from node.system.clock import Clock, moment
from node.text.text_rules import TextRules
from node.text.tokenizer import chat_template_digest, tokenizer_digest
from node.values.policy import PolicyVersion
from node.values.protocol import OURS, UNNUMBERED, check_common
from node.values.roles import Role
from node.values.run import RunSettings
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

    def reading(self, model_dir: Path) -> "Member":
        """Return it with what it reads text by: a model directory's tokenizer, chat template and rules.

        Raises:
            StartupError: the directory has no tokenizer, or a file is damaged.
        """
        rules = TextRules.of(model_dir)
        return dataclasses.replace(
            self,
            tokenizer_digest=tokenizer_digest(model_dir),
            chat_template_digest=chat_template_digest(model_dir),
            text_digest=rules.digest,
            text_summary=rules.summary,
        )


@dataclass(frozen=True, slots=True)
class OwnTask:
    """The run's task as this peer has it; by default not known yet."""

    prompts: int = 0
    """How many it has; 0: that is for samplers to say."""
    task_digest: bytes = b""
    """Digest of the options by which is graded."""
    grader_digest: bytes = b""
    """Digest of the code that grades."""


class JoinCall:
    """Joins as often as it is asked to.

    Attributes:
        task: Reported at each join.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        member: Member,
        *,
        reports: PeerReports,
        moved: Callable[[bytes], None],
        instance: str,
        clock: Clock,
        identity: Identity | OwnIdentity | None,
        hub: Hub | None,
    ) -> None:
        """Prepare the call of a process named ``instance``; ``moved`` is called in a thread."""
        self._stub = membership_pb2_grpc.MembershipServiceStub(channel)
        self._member = member
        self._reports = reports
        self._moved = moved
        self._instance = instance
        self._clock = clock
        self._identity = identity
        self._hub = hub
        self._next_renewal_s = -math.inf
        self.task = OwnTask()

    async def settings(self) -> RunSettings:
        """Join, and return the run's settings.

        A refusal of a version that this peer has left while the call ran makes it join once more.

        Raises RefusedError, ConnectionLost.
        """
        while True:
            held = self._reports.held()
            try:
                return await self._settings_with(held)
            except RefusedError as refused:
                # Steps are told on another stream, which may overtake this call.
                if refused.reason is not Reason.ROLLBACK or self._reports.held() == held:
                    raise
                logger.info("joining again with a newer version", extra={"detail": str(refused)})

    async def renew_if_due(self) -> None:
        """Join where this peer's certificate is late in its time; the answer has the next one.

        Raises RefusedError, ConnectionLost.
        """
        identity, now = self._identity, self._clock.now()
        if not isinstance(identity, OwnIdentity) or not identity.is_due(now):
            return
        if self._clock.monotonic() < self._next_renewal_s:
            return
        left_s = max(0.0, identity.current.not_after_s - now)
        self._next_renewal_s = self._clock.monotonic() + min(RENEWAL_RETRY_S, RENEWAL_RETRY_PART * left_s)
        await self.settings()

    async def _settings_with(self, held: PolicyVersion | None) -> RunSettings:
        base = self._reports.base()
        request = to_wire(
            membership_pb2.JoinRequest,
            self._member,
            **dataclasses.asdict(OURS),
            **dataclasses.asdict(self.task),
            held=optional_to_wire(common_pb2.PolicyVersion, held),
            instance=self._instance,
            base_root=base.root,
            base_parts=base.parts,
            base_part_names=base.part_names,
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
