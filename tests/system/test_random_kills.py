"""A few of the kills that ``python -m bench.kills`` does by the hundred."""

from pathlib import Path

import pytest

from bench.kill_lab.plan import KILLED, Plan
from bench.kill_lab.plan import MERGING as MERGING_ROLES
from bench.kills.__main__ import run

PAUSE_S = 0.06
"""Four steps a second: a run that waits for nothing takes all cores for as long as it is looked at."""


RANKING = Plan(
    kills=3, seed=219, samplers=("sampler-1",), frames=2, pause_s=PAUSE_S, policy="ranking", roles=KILLED
)
"""With this seed, a process of each role is killed."""
MERGING = Plan(
    kills=2,
    seed=276,
    samplers=("sampler-1",),
    frames=1,
    pause_s=PAUSE_S,
    roles=MERGING_ROLES,
    contributors=("contributor-1", "contributor-2"),
    method="decoupled",
)
"""With this seed, one of each role is killed, and half of the fleet is cut off once, silently, for 3 s."""


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("plan", [RANKING, MERGING], ids=["ranking", "merging"])
async def test_whatever_is_killed_whenever_nothing_unsigned_is_served_and_everything_goes_on(
    tmp_path: Path, plan: Plan
) -> None:
    summary = await run(plan, tmp_path / "kills")
    assert summary["violations"] == []
    assert summary["kills"] == plan.kills
    assert set(summary["killed"]) == set(plan.roles)
    # The witness has looked: an empty list of violations alone would not say so.
    assert summary["compared"]["claims"] > 0
    assert summary["compared"]["checkpoints"] > 0
    assert summary["compared"]["payload_bytes"] > 0
    assert summary["compared"]["groups"] > 0
    assert summary["groups_acknowledged"] > 0
    if plan.contributors:
        assert summary["versions_summed_again"] > 0
        assert summary["told_merged"] > 0
        assert summary["partitions"] == 1
