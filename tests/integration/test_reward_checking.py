"""Findings on their way to a real disk: streams that end and commits that fail meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.reward_checking import RewardChecking, Verifier
from node.coordinator.spool import Quarantines, Spool
from node.coordinator.transactions import Transactions
from node.coordinator.work.accounts import Transaction
from node.coordinator.work.step_history import Hello
from node.errors import Reason, RefusedError
from node.policy import PolicyVersion
from node.rollout import EncodedGroup, RewardCheck, RewardFinding
from node.telemetry.own_faults import OwnFaults
from node.verdict import GroupVerdict, Verdict
from support.clock import ManualClock
from support.coordinator import LEARNER, make_accounts, make_answer

LIE = RewardFinding("0.1", RewardCheck.DISAGREED, "completion 0 claims 1")


class GatedLedger(Ledger):
    """Writes once the gate is open, if there is one; with ``is_full``, nothing."""

    loop: asyncio.AbstractEventLoop
    gate: asyncio.Event | None = None
    writes: asyncio.Event
    is_full = False

    def record(self, *transactions: Transaction) -> None:
        if self.gate is not None:
            self.loop.call_soon_threadsafe(self.writes.set)
            asyncio.run_coroutine_threadsafe(self.gate.wait(), self.loop).result(10)
            if self.is_full:
                raise RefusedError(Reason.DISK, "the disk is full")
        super().record(*transactions)


@dataclass
class Checked:
    """A coordinator with a verifier, which was sent group 0.1 of sampler s1; its next write waits."""

    ledger: GatedLedger
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    clock: ManualClock = field(default_factory=ManualClock)
    told: list[tuple[str, GroupVerdict]] = field(default_factory=list)
    verifier: Verifier = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = CoordinatorMetrics(CollectorRegistry())
        self.accounts = make_accounts(self.ledger.balance(), now=self.clock.now())
        transactions = Transactions(
            self.ledger,
            self.accounts,
            metrics=self.metrics,
            faults=OwnFaults(self.clock.monotonic),
            clock=self.clock,
        )
        self.spool = Spool(
            transactions,
            is_published=lambda version: version == 0,
            notify=lambda *told: self.told.append(told),
            metrics=self.metrics,
            clock=self.clock,
        )
        self.checking = RewardChecking(
            transactions,
            self.spool,
            rows=None,
            notify=lambda *told: self.told.append(told),
            metrics=self.metrics,
        )

    async def begin(self) -> None:
        await self.spool.admit_learner(LEARNER)
        self.verifier = self.checking.admit("v", task_digest=b"", groups=8, noise_ratio=0.0)
        await self.spool.lease("s1", 1, PolicyVersion(0))
        group = make_answer(self.accounts, "0.1")
        submitted = await self.spool.submit(EncodedGroup(b"h", b"c", "0.1", "s1"), group.header)
        assert submitted.verdict is Verdict.SPOOLED
        await self.send()
        self.ledger.gate = self.gate

    async def send(self) -> None:
        group, _ = await anext(self.checking.groups(self.verifier))
        assert group.group_id == "0.1"

    async def note(self, finding: RewardFinding) -> "asyncio.Task[None]":
        """Return a finding that is decided, and on disk once the gate is open."""
        self.ledger.writes.clear()
        task = asyncio.create_task(self.checking.note(self.verifier, finding))
        await self.ledger.writes.wait()
        return task


@pytest.fixture
async def checked(tmp_path: Path) -> AsyncIterator[Checked]:
    ledger = GatedLedger.open(tmp_path / "ledger.sqlite", run_id="run")
    ledger.loop, ledger.writes = asyncio.get_running_loop(), asyncio.Event()
    opened = Checked(ledger)
    await opened.begin()
    yield opened
    opened.gate.set()
    await opened.spool.close()


async def test_a_proof_is_told_although_the_verifier_has_gone_before_it_is_on_disk(checked: Checked) -> None:
    drain = await checked.spool.open_drain(Hello("learner", 1, 0))
    drain.add_credits(1)
    delivered = aiter(checked.spool.deliver(drain))
    noting = await checked.note(LIE)
    noting.cancel()
    await asyncio.wait({noting})
    checked.checking.dismiss(checked.verifier)
    checked.gate.set()
    async with asyncio.timeout(10):
        told = await anext(delivered)
    assert isinstance(told, Quarantines)
    assert [one.sampler_id for one in told.samplers] == ["s1"]
    assert [verdict.verdict for _, verdict in checked.told] == [Verdict.SUSPECT]
    assert not checked.accounts.reward_checks.is_held(0)


@pytest.mark.parametrize("outcome", [RewardCheck.AGREED, RewardCheck.DISAGREED])
async def test_a_group_whose_finding_was_not_written_is_checked_again_and_meanwhile_not_delivered(
    checked: Checked, outcome: RewardCheck
) -> None:
    checked.ledger.is_full = True
    checked.gate.set()
    await (await checked.note(RewardFinding("0.1", outcome)))
    assert checked.accounts.reward_checks.is_held(0)
    assert checked.told == []
    await checked.checking.turn(checked.clock.now())
    checked.ledger.is_full = False
    await checked.send()
    await (await checked.note(RewardFinding("0.1", outcome)))
    assert not checked.accounts.reward_checks.is_held(0)
    assert checked.accounts.standings.of("s1").is_proven_liar is (outcome is RewardCheck.DISAGREED)
