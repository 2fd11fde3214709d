"""The spool's counts, its answers to samplers and to its learner, on a real ledger."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from node.coordinator.drain_stream import DrainStream
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.spool import Spool
from node.coordinator.transactions import Transactions
from node.coordinator.work.capacity import Capacity
from node.coordinator.work.decisions import room
from node.coordinator.work.step_history import Hello
from node.errors import Reason, RefusedError
from node.failure import FailedLease, Failure
from node.policy import PolicyVersion
from node.rollout import EncodedGroup
from node.run import StepRecord
from node.telemetry.own_faults import OwnFaults
from node.verdict import GroupVerdict, Verdict
from support.clock import ManualClock
from support.coordinator import LEARNER, TTL_S, make_accounts, make_answer


@dataclass
class Open:
    """A spool, its clock, its metrics, and what it told samplers."""

    ledger: Ledger
    clock: ManualClock = field(default_factory=ManualClock)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    told: list[tuple[str, GroupVerdict]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.metrics = CoordinatorMetrics(self.registry)
        accounts = make_accounts(self.ledger.balance(), now=self.clock.now())
        self.spool = Spool(
            Transactions(
                self.ledger,
                accounts,
                metrics=self.metrics,
                faults=OwnFaults(self.clock.monotonic),
                clock=self.clock,
            ),
            is_published=lambda version: version == 0,
            notify=lambda sampler_id, verdict: self.told.append((sampler_id, verdict)),
            metrics=self.metrics,
            clock=self.clock,
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"heterorl_coordinator_{name}", labels)

    def groups(self) -> dict[str, float]:
        """Return the verdicts that were counted at all."""
        counted = {verdict.value: self.value("groups_total", verdict=verdict.value) for verdict in Verdict}
        return {verdict: n for verdict, n in counted.items() if n}

    async def lease(self, sampler_id: str = "s1", wanted: int = 1) -> list[str]:
        grant = await self.spool.lease(sampler_id, wanted, PolicyVersion(0))
        return [lease.lease_id for lease in grant.leases]

    async def submit(self, lease_id: str, **changes: object) -> Verdict:
        now = self.clock.now()
        group = make_answer(
            self.spool.accounts,
            lease_id,
            sampling_started_at_s=now - 6.0,
            sampling_finished_at_s=now - 2.0,
            graded_at_s=now - 1.0,
            **changes,
        )
        submission = EncodedGroup(b"header", b"group", lease_id, "s1")
        return (await self.spool.submit(submission, group.header)).verdict

    async def drain(self, *, epoch: int = 1, version: int = 0, **hello: object) -> DrainStream:
        return await self.spool.open_drain(Hello("learner", epoch, version, **hello))  # type: ignore[arg-type]


@pytest.fixture
async def open_(tmp_path: Path) -> AsyncIterator[Open]:
    opened = Open(Ledger.open(tmp_path / "ledger.sqlite", run_id="run"))
    await opened.spool.admit_learner(LEARNER)
    yield opened
    await opened.spool.close()


async def test_a_group_is_counted_and_timed_at_every_stage_of_its_way(open_: Open) -> None:
    await open_.lease(wanted=2)
    drain = await open_.drain()
    assert await open_.submit("0.1") is Verdict.SPOOLED
    assert await open_.submit("0.1") is Verdict.DUPLICATE
    assert await open_.submit("1.1", task="other") is Verdict.FOREIGN
    open_.clock.advance(5.0)
    for _ in range(2):
        await open_.spool.judge(drain, GroupVerdict("0.1", Verdict.ACCEPTED))
    open_.clock.advance(2.0)
    await open_.spool.record_step(drain, StepRecord(1, ("0.1",), (3,)))
    assert open_.groups() == {"spooled": 1, "duplicate": 1, "foreign": 1, "accepted": 1, "trained": 1}
    assert {
        stage: open_.value("group_lag_seconds_sum", stage=stage)
        for stage in ("sampled", "graded", "uploaded", "delivered", "trained")
    } == {"sampled": 4.0, "graded": 1.0, "uploaded": 1.0, "delivered": 5.0, "trained": 7.0}
    assert open_.value("group_staleness_versions_sum") == 3.0
    assert open_.told == [
        ("s1", GroupVerdict("0.1", Verdict.ACCEPTED)),
        ("s1", GroupVerdict("0.1", Verdict.TRAINED)),
    ]


async def test_a_verdict_of_a_stream_that_a_newer_one_replaced_settles_nothing(open_: Open) -> None:
    """The newer one may have delivered the group again, to be trained on."""
    await open_.lease()
    old = await open_.drain()
    await open_.submit("0.1")
    await open_.drain()
    await open_.spool.judge(old, GroupVerdict("0.1", Verdict.UNINFORMATIVE))
    assert open_.spool.accounts.load().untrained_groups == 1


async def test_verdicts_are_counted_on_from_the_ledger_after_a_restart(open_: Open) -> None:
    await open_.lease()
    await open_.submit("0.1")
    again = Open(open_.ledger)
    assert again.groups() == {"spooled": 1}


async def test_leases_that_fail_or_expire_are_counted(open_: Open) -> None:
    await open_.lease(wanted=4)
    failed = (FailedLease("0.1", Failure.PROMPT_TOO_LONG, ""), FailedLease("9.1", Failure.PROMPT_FAILED, ""))
    assert await open_.spool.release("s1", ("1.1",), failed) == 2
    assert open_.value("prompt_faults_total", reason=Failure.PROMPT_TOO_LONG) == 1
    assert open_.value("prompt_faults_total", reason=Failure.PROMPT_FAILED) == 0
    assert open_.spool.renew("s1", ("2.1", "1.1")) == ("1.1",)
    open_.clock.advance(TTL_S - 1)
    assert open_.spool.renew("s1", ("2.1",)) == ()
    await open_.spool.expire()
    assert open_.value("lease_expiries_total") == 0
    open_.clock.advance(1)
    await open_.spool.expire()
    assert open_.value("lease_expiries_total") == 1  # 3.1; 2.1 was renewed


async def test_a_clock_that_is_set_back_keeps_no_lease_beyond_a_full_term(open_: Open) -> None:
    await open_.lease(wanted=2)
    open_.clock.advance(-3600.0)
    await open_.spool.expire()
    open_.clock.advance(TTL_S - 1)
    assert open_.spool.renew("s1", ("1.1",)) == ()
    await open_.spool.expire()
    assert open_.value("lease_expiries_total") == 0
    open_.clock.advance(1)
    await open_.spool.expire()
    assert open_.value("lease_expiries_total") == 1  # 0.1, of whom nobody has heard since


async def test_what_is_in_flight_is_shown(open_: Open) -> None:
    await open_.lease(wanted=2)
    await open_.submit("0.1")
    assert room(open_.spool.accounts) == Capacity(4, "staleness")
    open_.metrics.show(open_.spool.accounts)
    assert open_.value("slots", state="leased") == open_.value("slots", state="spooled") == 1
    assert open_.value("capacity_groups", bound="staleness") == 4
    assert open_.value("learner_version") == 0
    assert (open_.value("ledger_confirmed"), open_.value("ledger_behind")) == (1, 0)


async def test_a_learner_that_had_trained_on_a_delivered_group_is_counted(open_: Open) -> None:
    await open_.lease()
    await open_.submit("0.1")
    await open_.spool.judge(await open_.drain(), GroupVerdict("0.1", Verdict.DUPLICATE))
    assert open_.value("doubled_deliveries_total") == 1


async def test_a_step_on_settled_or_unknown_groups_is_counted_and_refused(open_: Open) -> None:
    await open_.lease(wanted=2)
    await open_.submit("0.1")
    drain = await open_.drain()
    await open_.spool.record_step(drain, StepRecord(1, ("0.1",), (0,)))
    with pytest.raises(RefusedError) as error:
        await open_.spool.record_step(drain, StepRecord(2, ("0.1",), (0,)))
    assert error.value.reason is Reason.DUPLICATE
    assert open_.spool.accounts.is_confirmed
    with pytest.raises(RefusedError) as error:
        await open_.spool.record_step(drain, StepRecord(2, ("1.1", "7.1"), (0, 0)))
    assert error.value.reason is Reason.LEDGER_BEHIND
    assert not open_.spool.accounts.is_confirmed
    assert open_.value("double_trainings_total") == 1
    assert open_.value("unknown_trainings_total") == 2
    open_.metrics.show(open_.spool.accounts)
    assert (open_.value("ledger_confirmed"), open_.value("ledger_behind")) == (0, 1)


async def test_a_stream_acknowledges_what_is_on_disk_and_ends_for_a_newer_one(open_: Open) -> None:
    drain = await open_.drain()
    assert drain.acknowledgement is None
    await open_.spool.record_step(drain, StepRecord(1, (), ()))
    assert drain.acknowledgement == 1
    newer = await open_.drain(version=2, records=(StepRecord(2, (), ()),))
    assert newer.acknowledgement == 2
    assert drain.is_ended
    with pytest.raises(RefusedError) as error:
        await open_.spool.record_step(drain, StepRecord(3, (), ()))
    assert error.value.reason is Reason.FENCED
    with pytest.raises(RefusedError) as error:
        await anext(open_.spool.deliver(drain))
    assert error.value.reason is Reason.FENCED
    assert open_.spool.accounts.last_step == 2


async def test_a_newer_learner_ends_the_stream_of_an_older_one_and_not_its_own(open_: Open) -> None:
    drain = await open_.drain()
    await open_.spool.admit_learner(LEARNER)
    assert not drain.is_ended
    await open_.spool.admit_learner(replace(LEARNER, epoch=2))
    assert drain.is_ended


async def test_a_group_that_is_submitted_is_delivered_without_another_look(open_: Open) -> None:
    await open_.lease()
    drain = await open_.drain()
    drain.add_credits(1)
    outgoing = open_.spool.deliver(drain)
    waiting = asyncio.ensure_future(anext(outgoing))
    await asyncio.sleep(0)
    assert not waiting.done()
    await open_.submit("0.1")
    async with asyncio.timeout(10):
        delivered = await waiting
    assert isinstance(delivered, EncodedGroup)
    assert (delivered.group_id, *delivered.parts) == ("0.1", b"header", b"group")
    drain.end()
    assert [each async for each in outgoing] == []


async def test_only_versions_that_are_new_are_logged_as_announced(open_: Open) -> None:
    await open_.spool.announce((PolicyVersion(1, b"a" * 16),))
    open_.clock.advance(5.0)
    await open_.spool.announce((PolicyVersion(1, b"b" * 16), PolicyVersion(2, b"c" * 16)))
    versions = open_.spool.accounts.versions
    head, now = PolicyVersion(2), open_.clock.now() + 1.0
    assert (versions.root_of(1), versions.lag(PolicyVersion(0), head, now=now)) == (b"a" * 16, (2, 6.0))
    assert (versions.root_of(2), versions.lag(PolicyVersion(1), head, now=now)) == (b"c" * 16, (1, 1.0))
