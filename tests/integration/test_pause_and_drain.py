"""Operators hold back the run or a sampler: a real coordinator, the real commands, peers by hand."""

import asyncio
import json
from pathlib import Path

import pytest

from heterorl.v1 import common_pb2, membership_pb2
from node.commands.cli import main
from support.enrolled import let_in
from support.hub import HandPeer, joined, members, running_hub
from support.identity import MadeRun


def order(made: MadeRun, *argv: str) -> int:
    return main([*argv, "--state-dir", str(made.directory)])


async def status_row(learner: HandPeer, sampler: HandPeer) -> membership_pb2.PeerStatus:
    status = await learner.status()
    return next(peer for peer in status.peers if peer.node_id == sampler.identity.node_id)


async def test_a_paused_run_leases_nothing_finishes_what_is_held_and_says_so_after_a_restart_too(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_hub(made) as hub, members(hub) as (learner, sampler):
        [lease] = (await sampler.lease()).leases
        assert order(made, "pause", "--because", "the judge is down") == 0
        none = await sampler.lease()
        assert (len(none.leases), none.waits_for) == (0, "paused")
        # The lease goes on, its group is taken in, delivered and trained on.
        assert not (await sampler.heartbeat(lease.lease_id)).lost_lease_ids
        assert (await sampler.submit(lease)).verdict == common_pb2.VERDICT_SPOOLED
        drain = await learner.drain(credits=1)
        assert await drain.group() == lease.lease_id
        await drain.judge(lease.lease_id, common_pb2.VERDICT_ACCEPTED)
        await drain.step(1, lease.lease_id)
        assert await drain.acknowledgement() == 1
        assert dict((await learner.status()).slots)["trained"] == 1
    async with running_hub(made) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join(held=common_pb2.PolicyVersion(number=1))
        await sampler.join()
        await learner.drain(version=1)
        await hub.has_heard_learner()
        hub.clock.advance(120)
        assert (await sampler.lease()).waits_for == "paused"
        headline = (await learner.status()).headline
        assert "its pause by an operator: the judge is down" in headline.waits_for
        assert 115 < headline.for_s < 1000
        assert [wait.remedy for wait in (await learner.status()).waits] == [
            "`heterorl-node resume` leases again."
        ]
        assert order(made, "pause") == 0
        assert "paused already" in capsys.readouterr().out
        assert order(made, "resume") == 0
        assert len((await sampler.lease()).leases) == 1
        assert order(made, "resume") == 0
        assert "not paused" in capsys.readouterr().out


async def test_a_drained_sampler_is_leased_nothing_and_shown_while_the_others_go_on(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    async with joined(made, made.sampler, made.other_sampler) as (_, learner, sampler, other):
        # By hand these have no tokens: their names are written into the file in advance.
        (made.directory / "coordinator" / "held_back").write_text(f"{sampler.identity.node_id}  # moves\n")
        held = await sampler.lease()
        assert (len(held.leases), held.waits_for) == (0, "drained")
        assert len((await other.lease()).leases) == 1
        row = await status_row(learner, sampler)
        assert (row.state, row.standing_detail) == (
            "drained",
            "drained by an operator: moves; it holds 0 leases",
        )
        assert (await status_row(learner, other)).state in ("joined", "live")
        assert order(made, "drain", "--list") == 0
        assert f"{sampler.identity.node_id}  moves" in capsys.readouterr().out
        assert order(made, "drain", "--list", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {sampler.identity.node_id: "moves"}
        assert order(made, "drain", "--undo", sampler.identity.node_id) == 0
        assert len((await sampler.lease()).leases) == 1


async def test_drain_names_a_node_that_was_never_let_in_and_leaves_a_pause_alone(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_hub(made):
        assert await asyncio.to_thread(order, made, "drain", "samplr-1") == 2
    assert "no node of this name has ever been let in" in capsys.readouterr().err
    assert order(made, "drain", "all") == 2
    assert order(made, "drain") == 2
    assert order(made, "drain", "--undo", "sampler-1") == 2
    assert "it is not drained" in capsys.readouterr().err
    assert order(made, "pause") == 0
    assert order(made, "drain", "--list") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no sampler is drained"


def test_a_drain_is_dated_and_keeps_what_people_wrote(made: MadeRun) -> None:
    path: Path = made.directory / "coordinator" / "held_back"
    path.write_text("# racks that move\n")
    let_in(made.directory, "sampler-1")
    assert order(made, "drain", "sampler-1", "--because", "a try") == 0
    text = path.read_text()
    assert text.startswith("# racks that move\nsampler-1  # 20")
    assert text.endswith(" UTC a try\n")
