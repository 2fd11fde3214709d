"""A run whose peers a benchmark plays: its directory, their identities, its coordinator as a process."""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from bench.role_on_wire import role_to_wire
from bench.shared.measured_process import MeasuredProcess, started
from heterorl.v1 import membership_pb2
from node.enrolment.authority import LEAF_LIFETIME_S, Authority
from node.enrolment.init_run import (
    AUTHORITY_DIRECTORY,
    IDENTITY_DIRECTORY,
    SIGNING_KEY_FILE,
    init_run,
    issue_identity,
)
from node.identity.identity_store import Identity, load_identity
from node.identity.peer import Peer
from node.identity.signatures import SigningKey
from node.values.protocol import OURS
from node.values.roles import Role


@dataclass(frozen=True, slots=True)
class Hub:
    """A coordinator's process and where it listens."""

    process: MeasuredProcess
    address: str
    telemetry: str
    """URL."""


@dataclass(frozen=True)
class PlayedRun:
    """The directory that ``heterorl-node init`` makes."""

    directory: Path

    @classmethod
    def make(cls, directory: Path, *, run_id: str = "bench") -> Self:
        """Make a run on this machine."""
        init_run(directory, run_id=run_id, hosts=("127.0.0.1",), now=time.time())
        return cls(directory)

    @cached_property
    def authority(self) -> Authority:
        """The authority of the run, with which peers are certified as enrolment would."""
        return Authority.load(self.directory / Role.COORDINATOR / AUTHORITY_DIRECTORY)

    def signing_key(self) -> SigningKey:
        """Return the learner's key."""
        return SigningKey.load(self.directory / Role.LEARNER / SIGNING_KEY_FILE)

    def own_identity(self, role: Role) -> Identity:
        """Return the identity that coordinator, learner or operator had from the start."""
        identity = load_identity(self.directory / role / IDENTITY_DIRECTORY)
        assert identity is not None, "init made it"
        return identity

    def new_identity(self, role: Role, node_id: str) -> Identity:
        """Certify a peer."""
        peer = Peer(self.authority.run_id, role, node_id)
        return issue_identity(self.authority, peer, now=time.time(), lifetime_s=LEAF_LIFETIME_S)

    @contextlib.asynccontextmanager
    async def coordinator(self, log: Path, settings: Mapping[str, object]) -> AsyncIterator[Hub]:
        """Run a coordinator on free ports until the body ends; ``settings`` by their full names."""
        listens = ("coordinator.listen", "coordinator.enrolment_listen", "telemetry.http_listen")
        settings = {"coordinator.task": "addition", **dict.fromkeys(listens, "127.0.0.1:0"), **settings}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        state = ("--state-dir", str(self.directory))
        async with started(("-m", "node", "--role", "coordinator", *state, *words), log) as process:
            serving, telemetry = await process.said("enrolment_listen"), await process.said("port")
            yield Hub(process, serving["listen"], f"http://127.0.0.1:{telemetry['port']}")


def join_request(run_id: str, role: Role, **fields: Any) -> membership_pb2.JoinRequest:
    """Return a request to join in our version of the protocol."""
    return membership_pb2.JoinRequest(run_id=run_id, role=role_to_wire(role), **asdict(OURS), **fields)
