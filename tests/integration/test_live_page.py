"""The page ``/`` of a coordinator that serves, and what it makes of hostile texts."""

import asyncio
import re
from dataclasses import replace

import pytest

from heterorl.v1 import membership_pb2
from node.coordinator import live_page as live_page_module
from node.coordinator.live_page import REFRESH_S, live_page
from node.identity.peer import Peer
from node.run import Role, RunStatus, StepReport, Wait
from support.hub import joined, running_hub
from support.identity import MadeRun

STEP = StepReport(3, 0.5, 1.5, 4, 0.01, 0.8, 0.1, 1.0, 2.5, 0.9)
RUN = RunStatus("first", None, 1, (), {}, {}, STEP, 5, "staleness", 0.0)


async def test_the_page_shows_the_run_and_is_worked_out_once_however_many_look(made: MadeRun) -> None:
    async with joined(made) as (hub, learner, _):
        live = hub.hub.live
        first = await asyncio.to_thread(live.render)
        assert learner.identity.node_id in first.decode()
        assert "reward: none yet" in first.decode()
        await learner.heartbeat(step=membership_pb2.StepReport(version=9, reward_mean=0.25))
        assert await asyncio.to_thread(live.render) == first
        hub.clock.advance(REFRESH_S)
        assert "reward: <b>0.25</b><br><small>at version 9" in (await asyncio.to_thread(live.render)).decode()


async def test_while_the_event_loop_hangs_one_look_waits_for_it_and_no_other(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page_module, "LOOK_S", 0.01)
    async with running_hub(made) as hub:
        with pytest.raises(TimeoutError):
            hub.hub.live.render()  # on the loop, which so cannot answer
        monkeypatch.setattr(live_page_module, "LOOK_S", 100.0)
        with pytest.raises(TimeoutError, match="has not answered yet"):
            hub.hub.live.render()
        hub.clock.advance(REFRESH_S)
        shown = await asyncio.to_thread(hub.hub.live.render)
        hub.clock.advance(REFRESH_S)
        monkeypatch.setattr(live_page_module, "LOOK_S", 0.01)
        with pytest.raises(TimeoutError):
            hub.hub.live.render()
        assert hub.hub.live.render() == shown


def test_texts_of_strangers_are_shown_and_never_obeyed() -> None:
    hostile = "<script>alert(1)</script>\x1b[2J"
    run = replace(RUN, run_id=hostile, waits=(Wait(hostile, hostile, 1.0, hostile),))
    page = live_page(run, [STEP], has_samples=True).decode()
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J waits for" in page


def test_curves_go_over_versions_and_leave_out_what_is_no_number() -> None:
    steps = [replace(STEP, version=v, reward_mean=r) for v, r in ((1, 0.0), (2, float("nan")), (5, 1.0))]
    page = live_page(RUN, steps, has_samples=False).decode()
    (reward,) = re.findall(r"<figcaption>reward: .*?</figure>", page, re.DOTALL)
    (line,) = re.findall(r'<polyline points="([^"]*)"', reward)
    assert len(line.split()) == 2
    assert {">0<", ">1<", ">0.4<", ">5<", ">version<"} <= set(re.findall(r">[^<>]+<", reward)), "both axes"
    assert page.count("<polyline") == 4


async def test_the_page_has_its_time_and_begins_with_peers_that_are_silent(made: MadeRun) -> None:
    async with joined(made) as (hub, learner, _):
        peers = hub.hub.peers
        for name in ("gone", "here"):
            peers.join(Peer(made.run_id, Role.SAMPLER, name), None, now=hub.clock.now())
        peers.expire(hub.clock.now() + 1000)
        hub.clock.advance(REFRESH_S)
        await learner.heartbeat()
        page = (await asyncio.to_thread(hub.hub.live.render)).decode()
    assert re.search(r"<small>\d{4}-\d\d-\d\d.*, by the coordinator", page)
    rows = re.findall(r"<tr><td>([^<]+)</td><td>\w+</td><td>(\w+)</td>", page)
    states = [state for _, state in rows if state in ("silent", "live", "joined")]
    assert states == sorted(states, key=["silent", "joined", "live"].index)
    assert "silent" in states
