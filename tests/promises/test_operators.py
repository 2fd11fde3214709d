"""An operator's words: what a running coordinator does about them, and that they outlive it."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from heterorl.v1 import common_pb2, membership_pb2, rollout_pb2
from node.coordinator import coordinator_role
from node.errors import Reason
from node.rpc.calls.server import ServerLimits
from node.values.limits import PROBE_S
from node.values.operator_order import ROLLBACK, Order
from node.values.roles import Role
from support.by_rpc import (
    SPOOLED,
    acknowledged,
    disk_of,
    refusal_of,
    row_of,
    say,
    until_confirmed,
    until_slots,
    verdicts,
)
from support.enrolled import let_in
from support.hub import TIMEOUT_S, RunningHub, joined, running_hub
from support.identity import MadeRun
from support.orders import give
from support.waiting import eventually

OFF = "0.92 +- .05 nats off"


@pytest.fixture(autouse=True)
def recheck_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut streams of who was revoked within a moment instead of seconds."""
    monkeypatch.setattr(coordinator_role, "ServerLimits", partial(ServerLimits, recheck_s=0.05))


async def test_a_paused_run_leases_nothing_finishes_what_is_held_and_stays_paused(
    made: MadeRun, tmp_path: Path
) -> None:
    async with joined(made) as (_, learner, sampler):
        (lease,) = (await sampler.lease()).leases
        await say(made, "pause", "--because", "the judge is down")
        none = await sampler.lease()
        assert (len(none.leases), none.waits_for) == (0, "paused")
        assert not (await sampler.heartbeat(lease.lease_id)).lost_lease_ids
        assert (await sampler.submit(lease)).verdict == SPOOLED
        drain = await learner.drain(credits=1)
        await drain.step(1, await drain.group())
        await acknowledged(drain, 1)
        lies = disk_of(made, tmp_path)
    async with running_hub(lies) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join(held=common_pb2.PolicyVersion(number=1))
        await sampler.join()
        await learner.drain(version=1)
        await until_confirmed(learner)
        assert (await sampler.lease()).waits_for == "paused"
        hub.clock.advance(120)
        headline = (await learner.status()).headline
        assert "the judge is down" in headline.waits_for
        assert 120 <= headline.for_s < 1000
        await say(lies, "resume")
        assert len((await sampler.lease()).leases) == 1


async def test_a_drained_sampler_is_leased_nothing_while_the_others_go_on(made: MadeRun) -> None:
    let_in(made.directory, "sampler-1")
    async with joined(made, made.sampler, made.other_sampler) as (_, learner, sampler, other):
        (lease,) = (await sampler.lease()).leases
        await say(made, "drain", "sampler-1", "--because", "it moves")
        none = await sampler.lease()
        assert (len(none.leases), none.waits_for) == (0, "drained")
        assert len((await other.lease()).leases) == 1
        row = await row_of(learner, "sampler-1")
        assert row.state == "drained"
        assert row.standing_detail.startswith("drained since 20")
        assert row.standing_detail.endswith(": it moves; it holds 1 lease")
        assert (await sampler.submit(lease)).verdict == SPOOLED
        await say(made, "drain", "--undo", "sampler-1")
        assert len((await sampler.lease()).leases) == 1


async def test_a_sampler_that_is_revoked_in_mid_stream_is_cut_off_and_its_leases_are_free(
    made: MadeRun,
) -> None:
    let_in(made.directory, "sampler-1")
    async with joined(made, made.sampler, made.other_sampler) as (_, learner, sampler, other):
        held, done = (await sampler.lease(2)).leases
        assert (await sampler.submit(done)).verdict == SPOOLED
        heartbeats = sampler.membership.Heartbeat(timeout=TIMEOUT_S)
        await heartbeats.write(membership_pb2.HeartbeatRequest(sequence=1))
        await heartbeats.read()
        await say(made, "revoke", "sampler-1")
        for call in (sampler.lease(), sampler.join(), sampler.submit(held), heartbeats.read()):
            refused = await refusal_of(call)
            assert (refused.reason, refused.names("sampler-1")) == (Reason.REVOKED, True)
        await until_slots(learner, available=1, spooled=1)
        assert [lease.lease_id for lease in (await other.lease()).leases] == ["0.2"]
        assert (await row_of(learner, "sampler-1")).state == "revoked"


async def test_a_revoked_learner_hears_nothing_more(made: MadeRun) -> None:
    let_in(made.directory, made.learner.node_id, role=Role.LEARNER)
    async with joined(made) as (_, learner, sampler):
        drain = await learner.drain(credits=9)
        (lease,) = (await sampler.lease()).leases
        await say(made, "revoke", made.learner.node_id)
        assert (await refusal_of(drain.stream.read())).reason is Reason.REVOKED
        await sampler.submit(lease)
        assert (await refusal_of(learner.join())).reason is Reason.REVOKED
        assert await verdicts(sampler) == {"spooled": 1}


async def test_what_a_revoked_sampler_said_against_a_prompt_goes_with_it(made: MadeRun) -> None:
    let_in(made.directory, "sampler-1")
    async with joined(made, made.sampler, made.other_sampler) as (_, learner, sampler, _):
        (lease,) = (await sampler.lease()).leases
        failed = [
            rollout_pb2.FailedLease(lease_id=lease.lease_id, fault=rollout_pb2.LEASE_FAULT_PROMPT_FAILED)
        ]
        await sampler.rollout.ReleaseLeases(rollout_pb2.ReleaseLeasesRequest(failed=failed))
        assert (await learner.status()).bad_prompts_total == 1
        await say(made, "revoke", "sampler-1")

        async def is_forgotten() -> bool:
            return bool((await learner.status()).bad_prompts_total == 0)

        await eventually(is_forgotten)


async def test_a_quarantine_by_the_learner_outlives_restarts_until_an_operator_pardons(
    made: MadeRun, tmp_path: Path
) -> None:
    let_in(made.directory, "sampler-1")
    async with joined(made, max_staleness_versions=50) as (_, learner, sampler):
        drain = await learner.drain()
        await drain.say(quarantine=rollout_pb2.Quarantine(sampler_id="sampler-1", reason=OFF))

        async def is_quarantined() -> bool:
            return bool((await row_of(learner, "sampler-1")).standing == "quarantined")

        await eventually(is_quarantined)
        assert (await sampler.lease()).waits_for == "quarantine"
        lies = disk_of(made, tmp_path)
    async with joined(lies, max_staleness_versions=50) as (hub, learner, sampler):
        assert OFF in (await row_of(learner, "sampler-1")).standing_detail
        drain = await learner.drain(credits=9)
        told = (await drain.hear()).quarantines
        assert [(one.sampler_id, one.reason) for one in told.samplers] == [("sampler-1", OFF)]
        assert (await sampler.lease()).waits_for == "quarantine"
        hub.clock.advance(PROBE_S)
        (probe,) = (await sampler.lease(8)).leases
        assert (await sampler.submit(probe)).verdict == SPOOLED
        assert await drain.group() == probe.lease_id
        assert (await sampler.lease()).waits_for == "quarantine"
        await say(lies, "pardon", "sampler-1")
        told = (await drain.hear()).quarantines
        assert (list(told.samplers), told.releases_others) == ([], True)
        assert len((await sampler.lease()).leases) == 1


async def test_what_operators_ordered_is_so_after_a_restart_between_any_two_orders(
    made: MadeRun, tmp_path: Path
) -> None:
    for name in ("sampler-1", "sampler-2"):
        let_in(made.directory, name)
    orders: tuple[tuple[tuple[str, ...], set[str]], ...] = (
        (("pause",), {"pause"}),
        (("drain", "sampler-1", "sampler-2"), {"pause", "drain sampler-1", "drain sampler-2"}),
        (("resume",), {"drain sampler-1", "drain sampler-2"}),
        (("revoke", "sampler-2"), {"drain sampler-1", "drain sampler-2", "revoke sampler-2"}),
        (("drain", "--undo", "sampler-1"), {"drain sampler-2", "revoke sampler-2"}),
        (("pardon", "all"), {"drain sampler-2", "revoke sampler-2"}),
        (("revoke", "--undo", "sampler-2"), {"drain sampler-2"}),
    )

    async def check(hub: RunningHub, expected: set[str]) -> None:
        async with hub.peer() as learner, hub.peer(made.sampler) as sampler:
            await learner.join(held=common_pb2.PolicyVersion())
            await learner.drain()
            await until_confirmed(learner)
            await sampler.join()
            waits_for = (await sampler.lease()).waits_for
            drained = "drained" if "drain sampler-1" in expected else ""
            assert waits_for == ("paused" if "pause" in expected else drained)
            shut_out = made.issue(Role.SAMPLER, "sampler-2")
            async with hub.peer(shut_out) as other:
                if "revoke sampler-2" in expected:
                    assert (await refusal_of(other.join())).reason is Reason.REVOKED
                else:
                    await other.join()

    lies = made
    for words, expected in orders:
        async with running_hub(lies) as hub:
            await say(lies, *words)
            copied = disk_of(lies, tmp_path)
            await check(hub, expected)
        lies = copied
        async with running_hub(lies) as hub:
            await check(hub, expected)


async def test_a_setting_and_a_rollback_reach_the_learner_before_any_group_until_it_has_answered(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with joined(made) as (_, learner, _):
        drain = await learner.drain(credits=1)
        asked = asyncio.create_task(say(made, "set", "learner.learning_rate=5e-7", "--because", "KL climbs"))
        (order,) = (await drain.hear()).orders.orders
        assert (order.verb, order.about, order.value) == ("set", "learner.learning_rate", "5e-07")
        assert order.because == "KL climbs"
        answer = rollout_pb2.OrderAnswer(order_id=order.order_id, answer="from version 1 on")
        await drain.say(order_answer=answer)
        await asked
        assert "from version 1 on" in capsys.readouterr().out
        lies = disk_of(made, tmp_path)
    async with joined(lies) as (_, learner, _):
        drain = await learner.drain(credits=1)
        # What holds is told to each learner; what has no answer yet, too.
        (held,) = (await drain.hear()).orders.orders
        assert (held.order_id, held.answer) == (order.order_id, "from version 1 on")
        (ordered,) = await give(lies.directory / "coordinator", Order(ROLLBACK, value="7", order_id="r"))
        assert ordered.answer == ""
        _, back = (await drain.hear()).orders.orders
        assert (back.verb, back.value) == ("rollback", "7")
        assert any("rollback 7" in one.what for one in (await learner.status()).unusual)
        lies = disk_of(lies, tmp_path)
    async with joined(lies) as (_, learner, _):
        drain = await learner.drain(credits=1)
        told = (await drain.hear()).orders.orders
        assert [one.verb for one in told] == ["set", "rollback"]
        refusal = rollout_pb2.OrderAnswer(order_id="r", answer="version 7 is not there", is_refused=True)
        await drain.say(order_answer=refusal)

        async def is_shown() -> bool:
            return any("version 7 is not there" in one.what for one in (await learner.status()).unusual)

        await eventually(is_shown)
        again = await learner.drain()
        assert [one.verb for one in (await again.hear()).orders.orders] == ["set"]
        assert (await refusal_of(drain.stream.read())).reason is Reason.FENCED
