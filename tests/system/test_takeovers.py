"""A few of the kills that ``python -m bench.takeover`` does by the dozen."""

from pathlib import Path

import pytest

from bench.kill_lab import takeovers
from bench.kill_lab.plan import Plan
from bench.takeover import run

KILLS = 2
"""Each coordinator leads once, and is killed."""

PAUSE_S = 0.06
"""Four steps a second: a run that waits for nothing takes all cores for as long as it is looked at."""


@pytest.mark.needs("postgresql")
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(280)
async def test_whichever_coordinator_leads_is_killed_and_the_other_goes_on_without_a_lost_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeovers, "STOPPED_EVERY", KILLS + 1)  # peers need half a minute to notice
    monkeypatch.setattr(takeovers, "STEPS", 4)  # more than the two that a learner makes from its buffer
    plan = Plan(kills=KILLS, seed=7, samplers=("sampler-1",), frames=1, pause_s=PAUSE_S)
    summary = await run(plan, tmp_path / "takeovers")
    assert summary["violations"] == []
    assert (summary["kills"], summary["stopped"]) == (KILLS, 0)
    # The witness has looked: an empty list of violations alone would not say so.
    assert summary["compared"]["claims"] > 0
    assert summary["compared"]["groups"] > 0
    assert summary["groups_acknowledged"] > 0
