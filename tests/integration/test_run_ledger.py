"""The ledger on a real disk: what happens when the disk, the caller or a stored byte fails."""

import asyncio
import gc
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.transactions import request_queue, run_ledger
from node.coordinator.work.balance import Transaction
from node.coordinator.work.decisions.decision import Decision
from node.errors import Reason, RefusedError
from node.values.groups.rollout import EncodedGroup, LeaseGrant
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.run import StepRecord
from support.coordinator import make_accounts
from support.door import OpenDoor
from support.refusals import refused
from support.waiting import until


class SlowLedger(Ledger):
    """A ledger whose writes wait to be let through."""

    gate: "asyncio.Event | None" = None
    loop: asyncio.AbstractEventLoop

    commits: "list[int]"
    """How many transactions each had."""

    def record(self, *transactions: Transaction) -> None:
        self.commits.append(len(transactions))
        if self.gate is not None:
            asyncio.run_coroutine_threadsafe(self.gate.wait(), self.loop).result(10)
        super().record(*transactions)

    def go_on(self) -> None:
        """Let what is being written be written."""
        assert self.gate is not None
        self.gate.set()

    def take_slot(self, slot: int) -> None:
        """Store a group of this slot, so that no other can be."""
        self._connection.execute(f"INSERT INTO groups VALUES ({slot}, 1, 's9', 0.0, x'00', x'00', x'00')")

    def fill_disk(self, *, but_pages: int = 0) -> None:
        pages = self._connection.execute("PRAGMA page_count").fetchone()[0]
        self._connection.execute(f"PRAGMA max_page_count = {pages + but_pages}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@asynccontextmanager
async def open_door(path: Path) -> AsyncIterator[tuple[OpenDoor, SlowLedger]]:
    ledger = SlowLedger.open(path, run_id="run")
    ledger.loop, ledger.commits = asyncio.get_running_loop(), []
    opened = OpenDoor(ledger, path.parent)
    await opened.admit_learner()
    try:
        yield opened, ledger
    finally:
        await opened.close()


@pytest.fixture
async def hub(path: Path) -> AsyncIterator[OpenDoor]:
    async with open_door(path) as (hub, _):
        yield hub


@pytest.fixture
def ledger(hub: OpenDoor) -> SlowLedger:
    assert isinstance(hub.ledger, SlowLedger)
    return hub.ledger


async def test_a_full_disk_refuses_the_group_and_takes_it_once_there_is_room(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    await hub.ask("s1", 1)
    before = dict(hub.accounts.slots.open_slots)
    ledger.fill_disk()
    with refused(Reason.DISK):
        await hub.submit("0.1", data=bytes(1 << 20))
    fault = hub.faults.first()
    assert fault is not None
    assert fault.what == "the ledger could not be written: database or disk is full"
    assert fault.fix == "Make room on the coordinator's disk. Nothing is lost."
    assert dict(hub.accounts.slots.open_slots) == before
    assert hub.accounts.tallies.total() == {}
    ledger.fill_disk(but_pages=1_000_000)
    assert await hub.submit("0.1", data=bytes(1 << 20)) is Verdict.SPOOLED


async def hold(hub: OpenDoor, ledger: SlowLedger) -> "asyncio.Task[Verdict]":
    """Return the submission of a group that is decided and not on disk until the gate is set."""
    await hub.ask("s1", 1)
    ledger.gate = asyncio.Event()
    submission = asyncio.create_task(hub.submit("0.1"))
    later = asyncio.create_task(hub.ask("s2", 1))
    # The later decision is taken after the group's was applied.
    await until(lambda: hub.accounts.load().untrained_groups == 1)
    assert not later.done()
    return submission


async def test_a_group_is_not_delivered_before_it_is_on_disk(hub: OpenDoor, ledger: SlowLedger) -> None:
    drain = await hub.open_stream()
    submission = await hold(hub, ledger)
    drain.add_credits(1)
    waiting = asyncio.ensure_future(anext(hub.learners.deliver(drain)))
    await asyncio.wait({waiting}, timeout=0.05)
    assert not waiting.done()
    ledger.go_on()
    delivered = await waiting
    assert submission.done()
    assert isinstance(delivered, EncodedGroup)
    assert delivered.group_id == "0.1"


async def test_a_repeat_is_not_answered_before_the_group_that_it_repeats_is_on_disk(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    await hub.ask("s1", 1)
    begun = await begin(hub, ledger)
    first, repeat = (asyncio.create_task(hub.submit("0.1")) for _ in range(2))
    await asyncio.sleep(0)
    gate, ledger.gate = ledger.gate, asyncio.Event()
    assert gate is not None
    gate.set()
    await begun
    await asyncio.wait({first, repeat}, timeout=0.05)
    assert not repeat.done()
    ledger.gate.set()
    assert (await first, await repeat) == (Verdict.SPOOLED, Verdict.DUPLICATE)


async def test_a_commit_that_fails_is_undone_and_its_callers_may_ask_again(
    hub: OpenDoor, ledger: SlowLedger, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("0.1", "1.1", "2.1")
    await hub.ask("s1", 3)
    drain = await hub.open_stream()
    fill = partial(ledger.fill_disk, but_pages=20)
    refusals = await together(hub, ledger, *names, size_bytes=1 << 20, then=fill)
    assert [error.reason for error in refusals] == [Reason.DISK] * 3
    assert "a commit of several transactions failed; went back to what the ledger holds" in caplog.messages
    again = make_accounts(ledger.balance(), now=hub.clock.now())
    assert dict(hub.accounts.slots.open_slots) == dict(again.slots.open_slots)
    assert hub.accounts.load() == again.load()
    assert hub.accounts.tallies.total() == {}
    with refused(Reason.DISK):
        await anext(hub.learners.deliver(drain))
    ledger.fill_disk(but_pages=1_000_000)
    assert [await hub.submit(name) for name in names] == [Verdict.SPOOLED] * 3


async def test_a_decision_that_nobody_waits_for_is_logged_where_it_fails(
    hub: OpenDoor, ledger: SlowLedger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.fill_disk()
    stores = Decision(None, Transaction(stored=EncodedGroup(b"", bytes(1 << 20), "0.1", "s1")))
    hub.run_ledger.decide_unheard(lambda accounts, /, *, now: stores)
    with refused(Reason.DISK):
        await hub.ask("s9")  # decided after it
    gc.collect()
    assert [record.message for record in caplog.records if record.exc_info] == [
        "decision failed that nobody waits for"
    ]


async def test_after_a_failed_commit_each_transaction_has_its_own_for_a_while(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    await hub.ask("s1", 3)
    ledger.fill_disk(but_pages=2)
    large = [asyncio.create_task(hub.submit(f"{n}.1", data=bytes(1 << 20))) for n in range(2)]
    await asyncio.wait(large)
    ledger.commits.clear()
    mixed = [asyncio.create_task(hub.submit(f"{n}.1", data=bytes(n << 20))) for n in (0, 1, 0)]
    await asyncio.wait(mixed)
    assert [task.exception() is None for task in mixed] == [True, False, True]
    assert ledger.commits == [1, 1]
    hub.clock.advance(run_ledger.CAREFUL_S)
    ledger.commits.clear()
    await asyncio.gather(*(hub.submit(f"{n}.1") for n in range(1, 3)))
    assert ledger.commits == [2]


async def test_a_transaction_that_cannot_be_written_costs_the_others_a_repeat(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    await hub.ask("s1", 2)
    refusals = await together(hub, ledger, "0.1", "1.1", then=partial(ledger.take_slot, 1))
    assert [error.reason for error in refusals] == [Reason.BUSY] * 2
    assert await hub.submit("0.1") is Verdict.SPOOLED
    with pytest.raises(sqlite3.IntegrityError):
        await hub.submit("1.1")


async def test_what_follows_from_an_answer_follows_on_disk_too_although_its_caller_has_gone(
    path: Path, hub: OpenDoor, ledger: SlowLedger
) -> None:
    await hub.ask("s1", 1)
    ledger.gate, before = asyncio.Event(), len(ledger.commits)
    caller = asyncio.create_task(hub.submit("0.1"))
    await until(lambda: len(ledger.commits) > before)
    caller.cancel()
    await asyncio.wait({caller})
    assert caller.cancelled()
    assert hub.value("groups_total", verdict="spooled") == 0
    ledger.go_on()
    await hub.ask("s2", held=None)  # decided after it
    assert hub.value("groups_total", verdict="spooled") == 1
    await hub.close()
    async with open_door(path) as (again, _):
        assert again.accounts.tallies.total() == hub.accounts.tallies.total() == {Verdict.SPOOLED: 1}
        assert dict(again.accounts.slots.open_slots) == dict(hub.accounts.slots.open_slots)


async def test_a_request_that_is_withdrawn_or_waits_too_long_is_not_decided(
    hub: OpenDoor, ledger: SlowLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hub.ask("s2", 2)
    begun = await begin(hub, ledger)
    gone = asyncio.create_task(hub.submit("0.1", "s2"))
    await until(lambda: hub.value("waiting_requests") == 1)
    gone.cancel()
    await asyncio.wait({gone})
    await until(lambda: hub.value("waiting_requests") == 0)
    monkeypatch.setattr(request_queue, "WAIT_S", 0.05)
    for late in (hub.submit("1.1", "s2"), hub.ask("s0")):
        with refused(Reason.BUSY):
            await late
    assert (dropped(hub, "gone"), dropped(hub, "late")) == (1, 2)
    ledger.go_on()
    await begun
    assert hub.accounts.tallies.total() == {}
    assert [hub.accounts.slots.open.running(name) for name in ("s0", "s2")] == [0, 2]


async def test_callers_beyond_the_bound_are_told_to_come_back(
    hub: OpenDoor, ledger: SlowLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "WAITING_REQUESTS", 2)
    ledger.gate = asyncio.Event()
    waiting = [asyncio.create_task(hub.ask("s1", 1)) for _ in range(3)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    refused = waiting[2].exception()
    assert isinstance(refused, RefusedError)
    assert refused.reason is Reason.BUSY
    ledger.gate.set()
    grants = [await task for task in waiting[:2]]
    assert [grant.leases[0].lease_id for grant in grants] == ["0.1", "1.1"]


async def begin(hub: OpenDoor, ledger: SlowLedger) -> "asyncio.Task[LeaseGrant]":
    """Return a caller whose lease, if one is left, is being written until the ledger's gate is set."""
    ledger.gate, before = asyncio.Event(), len(ledger.commits)
    begun = asyncio.create_task(hub.ask("s1", 1))
    await until(lambda: len(ledger.commits) > before or begun.done())
    return begun


async def together(
    hub: OpenDoor, ledger: SlowLedger, *groups: str, size_bytes: int = 5, then: Callable[[], object] = object
) -> list[Any]:
    """Submit groups while a lease is being written, whose write ends ``then``; return what came of each."""
    begun = await begin(hub, ledger)
    ledger.commits.clear()
    waiting = [asyncio.create_task(hub.submit(group, data=bytes(size_bytes))) for group in groups]
    await asyncio.sleep(0)
    ledger.go_on()
    await begun
    then()
    return await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("batch_bytes", "commits"), [(run_ledger.BATCH_BYTES, [4]), (2000, [2, 2])], ids=["all", "two at a time"]
)
async def test_requests_that_wait_while_one_is_written_share_commits_that_are_bounded_in_bytes(
    hub: OpenDoor,
    ledger: SlowLedger,
    monkeypatch: pytest.MonkeyPatch,
    batch_bytes: int,
    commits: list[int],
) -> None:
    monkeypatch.setattr(run_ledger, "BATCH_BYTES", batch_bytes)
    await hub.ask("s1", 4)
    found = await together(hub, ledger, "2.1", "0.1", "3.1", "1.1", size_bytes=1000)
    assert found == [Verdict.SPOOLED] * 4
    assert ledger.commits == commits
    assert sorted(ledger.balance().spooled_at_s) == [0, 1, 2, 3]


async def crowd(hub: OpenDoor, callers: int) -> "list[asyncio.Task[LeaseGrant]]":
    waiting = [asyncio.create_task(hub.ask(f"s{n}")) for n in range(callers)]
    await asyncio.sleep(0)
    return waiting


def dropped(hub: OpenDoor, cause: str) -> float | None:
    return hub.value("dropped_decisions_total", cause=cause)


async def test_nothing_is_leased_to_a_caller_that_went_away_while_it_waited(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    begun = await begin(hub, ledger)
    gone, patient = await crowd(hub, 2)
    assert hub.value("waiting_requests") == 2
    gone.cancel()
    await asyncio.wait({gone})
    ledger.go_on()
    assert [lease.lease_id for lease in (await begun).leases] == ["0.1"]
    assert [lease.lease_id for lease in (await patient).leases] == ["1.1"]
    assert hub.accounts.slots.open.running("s0") == 0
    assert dropped(hub, "gone") == 1


async def test_the_learner_is_not_held_up_by_a_thousand_samplers_that_wait(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    await hub.ask("s1", 1)
    await hub.submit("0.1")
    drain = await hub.open_stream()
    begun = await begin(hub, ledger)
    waiting = await crowd(hub, 1000)
    judging = asyncio.create_task(hub.learners.hear(drain, GroupVerdict("0.1", Verdict.ACCEPTED)))
    await asyncio.sleep(0)
    ledger.go_on()
    await asyncio.wait({begun})
    await judging
    assert sum(task.done() for task in waiting) < run_ledger.BATCH_REQUESTS
    assert hub.told == [("s1", GroupVerdict("0.1", Verdict.ACCEPTED))]
    await asyncio.wait(waiting)


async def test_one_sampler_that_asks_a_thousand_times_costs_another_one_turn(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    begun = await begin(hub, ledger)
    greedy = [asyncio.create_task(hub.ask("greedy", 1)) for _ in range(1000)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(hub.ask("modest", 1))
    await asyncio.sleep(0)
    assert dropped(hub, "full") == 1000 - request_queue.WAITING_PER_CALLER
    ledger.go_on()
    assert [lease.lease_id for lease in (await modest).leases] == ["2.1"]
    await asyncio.wait([begun, *greedy])


async def test_heartbeats_go_on_between_decisions_that_write_nothing(hub: OpenDoor) -> None:
    waiting = [asyncio.create_task(hub.ask(f"s{n}", held=None)) for n in range(200)]
    await asyncio.sleep(0)
    turns = 0
    while not all(task.done() for task in waiting):
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 200


async def test_a_thousand_that_wait_are_refused_at_once_when_the_coordinator_stops(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    begun = await begin(hub, ledger)
    waiting = await crowd(hub, 1000)
    closing = asyncio.create_task(hub.close())
    done, _ = await asyncio.wait(waiting, timeout=5)
    assert len(done) == 1000
    refusals = [task.exception() for task in waiting]
    assert {error.reason for error in refusals if isinstance(error, RefusedError)} == {Reason.DRAINING}
    assert not begun.done()
    ledger.go_on()
    assert [lease.lease_id for lease in (await begun).leases] == ["0.1"]
    await closing
    with refused(Reason.DRAINING):
        await hub.ask("s1", 1)


async def test_a_disk_that_hangs_does_not_hold_up_the_end_of_the_process(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_ledger, "CLOSE_S", 0.05)
    abandoned: list[str] = []
    monkeypatch.setattr(run_ledger, "abandon", abandoned.append)
    async with open_door(path) as (hub, ledger):
        begun = await begin(hub, ledger)
        await hub.close()
        assert abandoned == ["ledger"]
        assert "ledger not closed in time" in caplog.messages
        ledger.go_on()
        await begun
        ledger.close()


async def test_a_damaged_group_is_sampled_again_and_the_others_are_delivered(path: Path) -> None:
    async with open_door(path) as (hub, _):
        await hub.ask("s1", 2)
        await hub.submit("0.1")
        await hub.submit("1.1")
    with sqlite3.connect(path) as other:
        other.execute("UPDATE groups SET columns = CAST('bad' AS BLOB) WHERE slot = 0")
    other.close()
    async with open_door(path) as (hub, _):
        drain = await hub.open_stream()
        drain.add_credits(1)
        outgoing = hub.learners.deliver(drain)
        delivered = await anext(outgoing)
        assert isinstance(delivered, EncodedGroup)
        assert (delivered.group_id, *delivered.parts) == ("1.1", b"header", b"group")
        grant = await hub.ask("s2", 1)
        assert [lease.lease_id for lease in grant.leases] == ["0.2"]


async def test_a_group_that_is_replaced_while_it_is_on_its_way_costs_no_credit(hub: OpenDoor) -> None:
    await hub.ask("s1", 2)
    await hub.submit("0.1")
    await hub.submit("1.1")
    drain = await hub.open_stream()
    drain.add_credits(1)
    slot = hub.accounts.slots.open.next_undelivered()
    assert slot is not None
    drain.credits -= 1
    await hub.learners.hear(drain, GroupVerdict("0.1", Verdict.STALE))
    assert hub.told == [("s1", GroupVerdict("0.1", Verdict.STALE))]
    assert await hub.run_ledger.group(slot) is None
    await hub.ask("s1", 1)
    await hub.submit("0.2")
    assert await hub.run_ledger.group(slot) is None
    drain.credits += 1
    delivered = await anext(hub.learners.deliver(drain))
    assert isinstance(delivered, EncodedGroup)
    assert delivered.group_id == "0.2"


async def test_nothing_is_leased_with_a_step_that_shows_that_the_ledger_is_behind(
    hub: OpenDoor, ledger: SlowLedger
) -> None:
    drain = await hub.open_stream()
    begun = await begin(hub, ledger)
    step = asyncio.create_task(hub.learners.hear(drain, StepRecord(1, ("9.1",), (0,))))
    leasing = asyncio.create_task(hub.ask("s2", 1))
    await asyncio.sleep(0)
    ledger.go_on()
    await asyncio.wait({begun, step, leasing})
    assert isinstance(refused := step.exception(), RefusedError)
    assert refused.reason is Reason.LEDGER_BEHIND
    assert (await leasing).leases == ()


@pytest.mark.parametrize("ends", [False, True], ids=["before it is open", "the moment it is open"])
async def test_a_record_on_its_way_when_a_newer_stream_opens_is_not_taken(
    hub: OpenDoor, ledger: SlowLedger, ends: bool
) -> None:
    """Else a learner that was replaced could settle groups that its successor trains on."""
    old = await hub.open_stream()
    begun = await begin(hub, ledger)
    opening = asyncio.create_task(hub.open_stream())
    late = asyncio.create_task(hub.learners.hear(old, StepRecord(1, (), ())))
    await asyncio.sleep(0)
    if ends:  # as the newer stream does
        old.end()
    ledger.go_on()
    await asyncio.wait({begun, opening})
    with refused(Reason.FENCED):
        await late
    assert hub.accounts.last_step == 0
