"""Harm that one sampler can do to a run, and the answer to it: a real coordinator, peers by hand."""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from heterorl.v1 import membership_pb2, rollout_pb2
from node.commands import pardon_command
from node.limits import PROBE_S
from support.enrolled import let_in
from support.hub import HandDrain, HandPeer, joined, running_hub
from support.identity import MadeRun

OFF = "0.92 +- .05 nats off"


async def status_of(learner: HandPeer, sampler: HandPeer) -> membership_pb2.PeerStatus:
    status = await learner.status()
    return next(peer for peer in status.peers if peer.node_id == sampler.identity.node_id)


async def until_status(
    learner: HandPeer, condition: Callable[[membership_pb2.GetStatusResponse], bool]
) -> None:
    for _ in range(200):
        if condition(await learner.status()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(await learner.status())


async def until_none_is_leased(learner: HandPeer) -> None:
    await until_status(learner, lambda status: not dict(status.slots)["leased"])


def command(module: object, directory: Path, *nodes: str) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    assert module.run(parser.parse_args([*nodes, "--state-dir", str(directory)])) == 0  # type: ignore[attr-defined]


async def quarantine(drain: HandDrain, sampler: HandPeer, why: str) -> None:
    told = rollout_pb2.Quarantine(sampler_id=sampler.identity.node_id, reason=why)
    await drain.say(quarantine=told)


async def test_a_newcomer_gets_a_share_and_status_says_what_it_holds(made: MadeRun) -> None:
    async with joined(made, made.sampler, made.other_sampler, max_staleness_versions=50) as (
        hub,
        learner,
        hoarder,
        other,
    ):
        granted = await hoarder.lease(256)
        assert (len(granted.leases), granted.waits_for) == (12, "share")
        assert len((await other.lease(256)).leases) == 11
        hub.clock.advance(30)
        status = await status_of(learner, hoarder)
        assert (status.leases, status.lease_allowance, status.standing) == (12, 12, "newcomer")
        assert status.oldest_lease_s == 30


async def test_leases_end_at_their_maximal_age_although_heartbeats_name_them(made: MadeRun) -> None:
    async with joined(made, lease_max_s=120.0) as (hub, learner, hoarder):
        names = [lease.lease_id for lease in (await hoarder.lease(4)).leases]
        for _ in range(5):
            hub.clock.advance(30)
            await hoarder.heartbeat(*names)
        assert (await status_of(learner, hoarder)).standing == "hoards"
        hub.clock.advance(30)
        await until_none_is_leased(learner)
        assert "4 expired, 0 groups delivered" in (await status_of(learner, hoarder)).standing_detail


async def test_revoke_frees_leases_and_prompts_within_a_second(made: MadeRun) -> None:
    async with joined(made, max_staleness_versions=50) as (_hub, learner, sampler):
        leases = (await sampler.lease(9)).leases
        fault = rollout_pb2.LEASE_FAULT_PROMPT_TOO_LONG
        failed = [rollout_pb2.FailedLease(lease_id=leases[0].lease_id, fault=fault)]
        await sampler.rollout.ReleaseLeases(rollout_pb2.ReleaseLeasesRequest(failed=failed))
        (bad,) = (await learner.status()).bad_prompts
        assert list(bad.said_by) == [made.sampler.node_id]
        (made.directory / "coordinator" / "revoked").write_text(f"{made.sampler.node_id}\n")
        await until_none_is_leased(learner)
        assert (await learner.status()).bad_prompts_total == 0


async def test_a_quarantine_survives_restarts_and_leaves_a_probe_now_and_then(made: MadeRun) -> None:
    async with joined(made, max_staleness_versions=50) as (hub, learner, sampler):
        drain = await learner.drain()
        await quarantine(drain, sampler, OFF)
        await until_status(learner, lambda s: "quarantined" in {peer.standing for peer in s.peers})
        answer = await sampler.lease(8)
        assert (len(answer.leases), answer.waits_for) == (0, "quarantine")
        assert 290 < answer.retry_after_s <= PROBE_S
    async with joined(made, max_staleness_versions=50) as (hub, learner, sampler):
        assert OFF in (await status_of(learner, sampler)).standing_detail
        drain = await learner.drain(credits=10)
        first = await drain.hear()
        assert [(one.sampler_id, one.reason) for one in first.quarantines.samplers] == [
            (made.sampler.node_id, OFF)
        ]
        assert not first.quarantines.releases_others
        hub.clock.advance(PROBE_S)
        (probe,) = (await sampler.lease(8)).leases
        await sampler.submit(probe)
        assert await drain.group() == probe.lease_id
        assert len((await sampler.lease(8)).leases) == 0
        let_in(made.directory, made.sampler.node_id)
        command(pardon_command, made.directory, made.sampler.node_id)
        told = await drain.hear()
        assert (list(told.quarantines.samplers), told.quarantines.releases_others) == ([], True)
        assert len((await sampler.lease(8)).leases) == 8


async def test_a_pardon_asked_while_the_coordinator_is_away_is_taken_once_it_is_back(made: MadeRun) -> None:
    (made.directory / "coordinator").mkdir(exist_ok=True)
    let_in(made.directory, made.sampler.node_id)
    command(pardon_command, made.directory, "all")
    command(pardon_command, made.directory, made.sampler.node_id)
    async with running_hub(made) as hub, hub.peer(made.sampler) as sampler:
        await sampler.join()
        assert not list((made.directory / "coordinator").glob("pardoned*"))
