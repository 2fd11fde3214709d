"""The door's answers on a real ledger: how they are counted, and who is told of them."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.capacity import Capacity
from node.coordinator.work.decisions.leasing import ReturnedLeases, release, room
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.run import StepRecord
from support.coordinator import TTL_S
from support.door import OpenDoor


def groups(hub: OpenDoor) -> dict[str, float]:
    """Return the verdicts that were counted at all."""
    counted = {verdict.value: hub.value("groups_total", verdict=verdict.value) for verdict in Verdict}
    return {verdict: n for verdict, n in counted.items() if n}


async def submit(hub: OpenDoor, lease_id: str, **changes: object) -> Verdict:
    now = hub.clock.now()
    times = {
        "sampling_started_at_s": now - 6.0,
        "sampling_finished_at_s": now - 2.0,
        "graded_at_s": now - 1.0,
    }
    return await hub.submit(lease_id, **{**times, **changes})  # type: ignore[arg-type]


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[OpenDoor]:
    opened = OpenDoor(Ledger.open(tmp_path / "ledger.sqlite", run_id="run"), tmp_path)
    await opened.admit_learner()
    yield opened
    await opened.close()


async def test_a_group_is_counted_and_timed_at_every_stage_of_its_way(hub: OpenDoor) -> None:
    await hub.lease(wanted=2)
    drain = await hub.open_stream()
    assert await submit(hub, "0.1") is Verdict.SPOOLED
    assert await submit(hub, "0.1") is Verdict.DUPLICATE
    assert await submit(hub, "1.1", task="other") is Verdict.FOREIGN
    hub.clock.advance(5.0)
    for _ in range(2):
        await hub.learners.hear(drain, GroupVerdict("0.1", Verdict.ACCEPTED))
    hub.clock.advance(2.0)
    await hub.learners.hear(drain, StepRecord(1, ("0.1",), (3,)))
    assert groups(hub) == {"spooled": 1, "duplicate": 1, "foreign": 1, "accepted": 1, "trained": 1}
    assert {
        stage: hub.value("group_lag_seconds_sum", stage=stage)
        for stage in ("sampled", "graded", "uploaded", "delivered", "trained")
    } == {"sampled": 4.0, "graded": 1.0, "uploaded": 1.0, "delivered": 5.0, "trained": 7.0}
    assert hub.value("group_staleness_versions_sum") == 3.0
    assert hub.told == [
        ("s1", GroupVerdict("0.1", Verdict.ACCEPTED)),
        ("s1", GroupVerdict("0.1", Verdict.TRAINED)),
    ]


async def test_a_verdict_of_a_stream_that_a_newer_one_replaced_settles_nothing(hub: OpenDoor) -> None:
    """The newer one may have delivered the group again, to be trained on."""
    await hub.lease()
    old = await hub.open_stream()
    await submit(hub, "0.1")
    await hub.open_stream()
    await hub.learners.hear(old, GroupVerdict("0.1", Verdict.UNINFORMATIVE))
    assert hub.accounts.load().untrained_groups == 1


async def test_verdicts_are_counted_on_from_the_ledger_after_a_restart(hub: OpenDoor) -> None:
    await hub.lease()
    await submit(hub, "0.1")
    again = OpenDoor(hub.ledger, hub.directory)
    assert groups(again) == {"spooled": 1}


async def test_leases_that_fail_or_expire_are_counted(hub: OpenDoor) -> None:
    await hub.lease(wanted=4)
    failed = (FailedLease("0.1", Failure.PROMPT_TOO_LONG, ""), FailedLease("9.1", Failure.PROMPT_FAILED, ""))
    returned = ReturnedLeases("s1", ("1.1",), failed)
    assert (await hub.run_ledger.decide(partial(release, request=returned))).leases == 2
    assert hub.value("prompt_faults_total", reason=Failure.PROMPT_TOO_LONG) == 1
    assert hub.value("prompt_faults_total", reason=Failure.PROMPT_FAILED) == 0
    assert hub.accounts.renew("s1", ("2.1", "1.1"), now=hub.clock.now()) == ("1.1",)
    hub.clock.advance(TTL_S - 1)
    assert hub.accounts.renew("s1", ("2.1",), now=hub.clock.now()) == ()
    await hub.expire()
    assert hub.value("lease_expiries_total") == 0
    hub.clock.advance(1)
    await hub.expire()
    assert hub.value("lease_expiries_total") == 1  # 3.1; 2.1 was renewed


async def test_a_clock_that_is_set_back_keeps_no_lease_beyond_a_full_term(hub: OpenDoor) -> None:
    await hub.lease(wanted=2)
    hub.clock.advance(-3600.0)
    await hub.expire()
    hub.clock.advance(TTL_S - 1)
    assert hub.accounts.renew("s1", ("1.1",), now=hub.clock.now()) == ()
    await hub.expire()
    assert hub.value("lease_expiries_total") == 0
    hub.clock.advance(1)
    await hub.expire()
    assert hub.value("lease_expiries_total") == 1  # 0.1, of whom nobody has heard since


async def test_what_is_in_flight_is_shown(hub: OpenDoor) -> None:
    await hub.lease(wanted=2)
    await submit(hub, "0.1")
    assert room(hub.accounts) == Capacity(4, "staleness")
    hub.metrics.show(hub.accounts)
    assert hub.value("slots", state="leased") == hub.value("slots", state="spooled") == 1
    assert hub.value("capacity_groups", bound="staleness") == 4
    assert hub.value("learner_version") == 0
    assert (hub.value("ledger_confirmed"), hub.value("ledger_behind")) == (1, 0)
    hub.accounts.doubt("version 2")
    hub.metrics.show(hub.accounts)
    assert (hub.value("ledger_confirmed"), hub.value("ledger_behind")) == (0, 1)


async def test_a_learner_that_had_trained_on_a_delivered_group_is_counted(hub: OpenDoor) -> None:
    await hub.lease()
    await submit(hub, "0.1")
    await hub.learners.hear(await hub.open_stream(), GroupVerdict("0.1", Verdict.DUPLICATE))
    assert hub.value("doubled_deliveries_total") == 1
