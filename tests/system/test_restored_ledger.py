"""A few of the restores that ``python -m bench.restores`` does by the dozen."""

from pathlib import Path

import pytest

from bench.kill_lab import restores
from bench.kill_lab.plan import Plan
from bench.restores import run

MOMENTS, SEED = 2, 3352
"""With this seed, a ledger copied by hand is refused and the newest put back; then a loss is accepted."""

PAUSE_S = 0.06
"""Four steps a second: a run that waits for nothing takes all cores for as long as it is looked at."""


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(280)
async def test_under_an_older_ledger_a_real_run_goes_on_or_says_why_not_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "STEPS", 4)  # more than a learner that is refused makes from its buffer
    monkeypatch.setattr(restores, "STEPS_BETWEEN", 4)
    plan = Plan(kills=0, seed=SEED, samplers=("sampler-1",), frames=1, pause_s=PAUSE_S)
    summary = await run(plan, tmp_path / "restores", moments=MOMENTS)
    assert summary["violations"] == []
    assert summary["moments"] == MOMENTS
    assert (summary["refused_aloud"], summary["went_on_at_once"]) == (1, 1)
    assert min(summary["steps_behind"]) > 0
    assert summary["groups_trained_on"] > 0
