"""Findings on their way to a real disk: streams that end and commits that fail meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from node.coordinator.ledger.ledger_check import examine
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.streams.learner_stream import LearnerStream, Quarantines
from node.coordinator.streams.reward_checking import RewardChecking, Verifier
from node.coordinator.work.balance import Transaction
from node.coordinator.work.checks.reward_checks import HELD_S, MOST_TRIES
from node.errors import Reason, RefusedError
from node.values.groups.reward_finding import RewardCheck, RewardFinding
from node.values.groups.rollout import EncodedGroup
from node.values.groups.verdict import Verdict
from node.values.run import StepRecord
from support.coordinator import BOUNDS
from support.door import OpenDoor

WIDE = replace(BOUNDS, max_staleness_versions=50, concurrency_groups=64, buffer_groups=64)
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
    directory: Path
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    hub: OpenDoor = field(init=False)
    verifier: Verifier = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin with what the ledger holds."""
        self.hub = hub = OpenDoor(self.ledger, self.directory, bounds=WIDE)
        self.accounts = hub.accounts
        self.checking = RewardChecking(
            hub.run_ledger, hub.learners, rows=None, metrics=hub.metrics, clock=hub.clock
        )

    async def begin(self) -> None:
        await self.hub.admit_learner()
        self.verifier = self.checking.admit("v", task_digest=b"", groups=8, noise_ratio=0.0)
        await self.hub.lease("s1")
        assert await self.hub.submit("0.1") is Verdict.SPOOLED
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
    opened = Checked(ledger, tmp_path)
    await opened.begin()
    yield opened
    opened.gate.set()
    await opened.hub.close()


async def test_a_proof_is_told_although_the_verifier_has_gone_before_it_is_on_disk(checked: Checked) -> None:
    drain = await checked.hub.open_stream()
    drain.add_credits(1)
    delivered = aiter(checked.hub.learners.deliver(drain))
    noting = await checked.note(LIE)
    noting.cancel()
    await asyncio.wait({noting})
    checked.checking.dismiss(checked.verifier)
    checked.gate.set()
    async with asyncio.timeout(10):
        told = await anext(delivered)
    assert isinstance(told, Quarantines)
    assert [one.sampler_id for one in told.samplers] == ["s1"]
    assert [verdict.verdict for _, verdict in checked.hub.told] == [Verdict.SUSPECT]
    assert not checked.accounts.reward_checks.is_held(0)


@pytest.mark.parametrize("outcome", [RewardCheck.AGREED, RewardCheck.DISAGREED])
async def test_a_group_whose_finding_was_not_written_is_checked_again_and_meanwhile_not_delivered(
    checked: Checked, outcome: RewardCheck
) -> None:
    checked.ledger.is_full = True
    checked.gate.set()
    await (await checked.note(RewardFinding("0.1", outcome)))
    assert checked.accounts.reward_checks.is_held(0)
    assert checked.hub.told == []
    await checked.checking.turn(checked.hub.clock.now())
    checked.ledger.is_full = False
    await checked.send()
    await (await checked.note(RewardFinding("0.1", outcome)))
    assert not checked.accounts.reward_checks.is_held(0)
    assert checked.accounts.standings.of("s1").is_proven_liar is (outcome is RewardCheck.DISAGREED)


async def deliver(checked: Checked) -> LearnerStream:
    """Open the learner's stream and take a group that it may be sent."""
    drain = await checked.hub.open_stream()
    drain.add_credits(9)
    delivered = aiter(checked.hub.learners.deliver(drain))
    async with asyncio.timeout(10):
        while not isinstance(await anext(delivered), EncodedGroup):
            pass
    return drain


async def test_a_lie_trained_on_while_the_verifier_was_silent_is_found_after_a_restart_of_the_coordinator(
    checked: Checked, tmp_path: Path
) -> None:
    """Its bytes stay in the ledger until it was checked, and no longer."""
    checked.gate.set()
    checked.hub.clock.advance(HELD_S + 1)
    await checked.checking.turn(checked.hub.clock.now())
    assert [one.what for one in checked.checking.unusual] == ["verifier that answers nothing"]
    drain = await deliver(checked)
    await checked.hub.learners.hear(drain, StepRecord(1, ("0.1",), (0,)))
    assert checked.accounts.reward_checks.owed == 1

    path = tmp_path / "ledger.sqlite"
    await checked.hub.close()
    assert examine(path).problems == ()
    checked.ledger = GatedLedger.open(path, run_id="run")
    checked.start()
    checked.verifier = checked.checking.admit("v", task_digest=b"", groups=8, noise_ratio=0.0)
    await checked.send()
    await checked.checking.note(checked.verifier, LIE)
    assert checked.accounts.standings.of("s1").is_proven_liar
    assert checked.ledger.group(0) is None
    assert checked.accounts.reward_checks.owed == 0


async def agree(checked: Checked, sampler_id: str) -> None:
    """Let the verifier agree with another sampler's next group."""
    (lease_id,) = await checked.hub.lease(sampler_id)
    await checked.hub.submit(lease_id, sampler_id)
    async with asyncio.timeout(10):
        sent, _ = await anext(checked.checking.groups(checked.verifier))
    assert sent.group_id == lease_id
    await checked.checking.note(checked.verifier, RewardFinding(lease_id, RewardCheck.AGREED))


async def test_a_check_that_is_late_while_others_are_answered_is_held_against_its_sampler(
    checked: Checked,
) -> None:
    checked.gate.set()
    before = checked.accounts.standings.of("s1")
    strikes = []
    for n in range(2 * MOST_TRIES):
        assert checked.hub.told == []
        await agree(checked, f"t{n}")
        checked.hub.clock.advance(HELD_S / 2 + 1)
        await checked.checking.turn(checked.hub.clock.now())
        strikes.append(checked.accounts.standings.of("s1").strikes - before.strikes)
        assert checked.accounts.reward_checks.is_open
    assert strikes == [0, 2, 2, 2, 2, 4]  # late, and at last thrown out
    assert [(name, verdict.group_id, verdict.verdict) for name, verdict in checked.hub.told] == [
        ("s1", "0.1", Verdict.SUSPECT)
    ]
