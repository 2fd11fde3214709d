"""A coordinator without a network: its door, its ledger on a disk, its clock; and what it told samplers."""

from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from node.coordinator.fleet.peer_reports import Joining
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.peers.peers import Peers
from node.coordinator.requests.door import Door
from node.coordinator.streams.learner_stream import LearnerStream, LearnerStreams
from node.coordinator.transactions.outcomes import Outcomes
from node.coordinator.transactions.run_ledger import RunLedger
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions import leasing
from node.coordinator.work.decisions.leasing import Expired, LeaseRequest
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.decisions.submitted_groups import Submission
from node.identity.peer import Peer
from node.identity.revocation import RevocationList
from node.telemetry.own_faults import OwnFaults
from node.values.groups.rollout import EncodedGroup, LeaseGrant
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.policy import PolicyVersion
from node.values.roles import Role
from support.clock import ManualClock
from support.coordinator import BOUNDS, LEARNER, make_accounts, make_answer


@dataclass
class OpenDoor:
    """Where samplers need not join first."""

    ledger: Ledger
    directory: Path
    """The directory of the ledger."""
    bounds: Bounds = BOUNDS
    clock: ManualClock = field(default_factory=ManualClock)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    told: list[tuple[str, GroupVerdict]] = field(default_factory=list)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin with what the ledger holds."""
        self.metrics = CoordinatorMetrics(self.registry)
        self.accounts = make_accounts(self.ledger.balance(), now=self.clock.now(), bounds=self.bounds)
        self.faults = OwnFaults(self.clock.monotonic)
        self.run_ledger = RunLedger(
            self.ledger, self.accounts, metrics=self.metrics, faults=self.faults, clock=self.clock
        )
        Outcomes(
            self.accounts,
            notify=lambda *told: self.told.append(told),
            metrics=self.metrics,
            clock=self.clock,
        ).follow(self.run_ledger)
        self.learners = LearnerStreams(self.run_ledger)
        self.peers = Peers(
            self.accounts,
            silent_after_s=30.0,
            heartbeat_interval_s=2.0,
            head=lambda: None,
            metrics=self.metrics,
        )
        self.door = Door(
            self.run_ledger,
            self.peers,
            self.learners,
            RevocationList(lambda: self.accounts.orders.revoked),
            self.clock,
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"heterorl_coordinator_{name}", labels)

    async def admit_learner(self) -> None:
        await self.learners.admit(LEARNER)

    async def ask(self, sampler_id: str = "s1", wanted: int = 1, *, held: int | None = 0) -> LeaseGrant:
        """Lease prompts to a sampler, which joins where it has not."""
        peer = Peer("run", Role.SAMPLER, sampler_id)
        if peer not in self.peers:
            self.peers.join(peer, Joining(None), now=self.clock.now())
        version = None if held is None else PolicyVersion(held)
        return await self.door.lease(peer, LeaseRequest(sampler_id, wanted, version))

    async def lease(self, sampler_id: str = "s1", wanted: int = 1) -> list[str]:
        return [lease.lease_id for lease in (await self.ask(sampler_id, wanted)).leases]

    async def submit(
        self, lease_id: str, sampler_id: str = "s1", *, data: bytes = b"group", **changes: object
    ) -> Verdict:
        group = make_answer(self.accounts, lease_id, **changes)
        encoded = EncodedGroup(b"header", data, lease_id, sampler_id)
        return (await self.door.submit(Submission(encoded, group.header))).verdict

    async def open_stream(self, *, epoch: int = 1, version: int = 0, **hello: object) -> LearnerStream:
        return await self.learners.open(Hello("learner", epoch, version, **hello))  # type: ignore[arg-type]

    async def expire(self) -> Expired:
        self.accounts.note_time(self.clock.now())
        return await self.run_ledger.decide(leasing.expiry)

    async def close(self) -> None:
        """Close the ledger, unless it is closed."""
        if not self.is_closed:
            self.is_closed = True
            await self.door.close()
