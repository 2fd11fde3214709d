"""The page ``/`` of a coordinator that serves."""

import asyncio
import re

import pytest

from heterorl.v1 import membership_pb2
from node.coordinator import run_status
from node.coordinator.fleet.peer_reports import Joining
from node.identity.peer import Peer
from node.page.live_page import REFRESH_S, LivePage
from node.values.roles import Role
from support.hub import RunningHub, joined, running_hub
from support.identity import MadeRun


def page_of(hub: RunningHub) -> LivePage:
    page = LivePage(hub.clock)
    page.add("first", hub.hub.live.sections, is_moving=True)
    return page


async def looked(page: LivePage) -> str:
    shown = await asyncio.to_thread(page.render)
    assert shown is not None
    return shown.decode()


async def test_the_page_shows_the_run_and_is_worked_out_once_however_many_look(made: MadeRun) -> None:
    async with joined(made) as (hub, learner, _):
        page = page_of(hub)
        first = await looked(page)
        assert learner.identity.node_id in first
        assert "<h2>Steps</h2>\n<p>None yet.</p>" in first
        await learner.heartbeat(step=membership_pb2.StepReport(version=9, reward_mean=0.25))
        assert await looked(page) == first
        hub.clock.advance(REFRESH_S)
        assert "reward: <b>0.25</b><br><small>at version 9" in await looked(page)


async def test_while_the_event_loop_hangs_one_look_waits_for_it_and_no_other(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_status, "LOOK_S", 0.01)
    async with running_hub(made) as hub:
        page = page_of(hub)
        with pytest.raises(TimeoutError):
            page.render()  # on the loop, which so cannot answer
        monkeypatch.setattr(run_status, "LOOK_S", 100.0)
        with pytest.raises(TimeoutError):
            page.render()
        hub.clock.advance(REFRESH_S)
        shown = await looked(page)
        hub.clock.advance(REFRESH_S)
        monkeypatch.setattr(run_status, "LOOK_S", 0.01)
        with pytest.raises(TimeoutError):
            page.render()
        assert page.render() == shown.encode()


async def test_the_page_has_its_time_and_begins_with_peers_that_are_silent(made: MadeRun) -> None:
    async with joined(made) as (hub, learner, _):
        peers = hub.hub.peers
        for name in ("gone", "here"):
            peers.join(Peer(made.run_id, Role.SAMPLER, name), Joining(None), now=hub.clock.now())
        peers.expire(hub.clock.now() + 1000)
        hub.clock.advance(REFRESH_S)
        await learner.heartbeat()
        page = await looked(page_of(hub))
    assert re.search(r"<small>\d{4}-\d\d-\d\d.*, by this machine", page)
    rows = re.findall(r"<tr><td>([^<]+)</td><td>\w+</td><td>(\w+)</td>", page)
    states = [state for _, state in rows if state in ("silent", "live", "joined")]
    assert states == sorted(states, key=["silent", "joined", "live"].index)
    assert "silent" in states
