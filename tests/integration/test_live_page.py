"""The page ``/`` of a coordinator that serves, and what it makes of hostile texts."""

import asyncio
from dataclasses import replace

import pytest

from heterorl.v1 import membership_pb2
from node.coordinator import live_page as live_page_module
from node.coordinator.live_page import REFRESH_S, live_page
from node.run import RunStatus, StepReport, Wait
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
    assert '<polyline points="0.0,80.0 320.0,0.0"/>' in page
    assert page.count("<polyline") == 4
