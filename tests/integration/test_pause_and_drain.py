"""Operators hold back the run or a sampler: a real coordinator, the real commands, peers by hand."""

import asyncio
import json

import pytest

from heterorl.v1 import membership_pb2
from node.commands.cli import main
from support.enrolled import let_in
from support.hub import HandPeer, joined, running_hub
from support.identity import MadeRun


async def order(made: MadeRun, *argv: str) -> int:
    return await asyncio.to_thread(main, [*argv, "--state-dir", str(made.directory)])


async def status_row(learner: HandPeer, sampler: HandPeer) -> membership_pb2.PeerStatus:
    status = await learner.status()
    return next(peer for peer in status.peers if peer.node_id == sampler.identity.node_id)


async def test_a_pause_says_since_when_and_what_ends_it_and_is_given_once(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    async with joined(made) as (hub, learner, _):
        assert await order(made, "pause", "--because", "the judge is down") == 0
        hub.clock.advance(120)
        status = await learner.status()
        assert "the judge is down" in status.headline.waits_for
        assert 115 < status.headline.for_s < 1000
        assert [wait.remedy for wait in status.waits] == ["`heterorl-node resume` leases again."]
        assert await order(made, "pause") == 0
        assert "the judge is down" in capsys.readouterr().out
        assert hub.metric("heterorl_coordinator_paused") in (0.0, 1.0)
        for _ in range(2):
            assert await order(made, "resume") == 0
        assert "there is no pause to end" in capsys.readouterr().out
        assert "its pause" not in (await learner.status()).headline.waits_for


async def test_a_drained_sampler_is_shown_with_who_when_and_why(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    let_in(made.directory, "sampler-1")
    async with joined(made, made.sampler, made.other_sampler) as (_, learner, sampler, other):
        assert await order(made, "drain", "sampler-1", "--because", "moves") == 0
        row = await status_row(learner, sampler)
        assert row.state == "drained"
        assert row.standing_detail.startswith("drained since 20")
        assert row.standing_detail.endswith(": moves; it holds 0 leases")
        assert (await status_row(learner, other)).state in ("joined", "live")
        capsys.readouterr()
        assert await order(made, "drain", "--list") == 0
        assert capsys.readouterr().out.split()[0] == "sampler-1"
        assert await order(made, "drain", "--list", "--json") == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert (told["about"], told["because"]) == ("sampler-1", "moves")


async def test_drain_names_a_node_that_was_never_let_in_and_leaves_a_pause_alone(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_hub(made):
        assert await order(made, "drain", "samplr-1") == 2
        assert "samplr-1" in capsys.readouterr().err
        assert await order(made, "drain", "all") == 2
        assert await order(made, "drain") == 2
        assert await order(made, "drain", "--undo", "sampler-1") == 2
        assert "sampler-1" in capsys.readouterr().err
        assert await order(made, "pause") == 0
        assert await order(made, "drain", "--list") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no sampler is drained"
