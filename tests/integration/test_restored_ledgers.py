"""Ledgers restored from random moments, everything restarted in random orders: no id twice, no silence."""

from collections import Counter
from pathlib import Path

import pytest

from node.coordinator.ledger.ledger_check import examine
from node.errors import Reason
from support.restoration import Run

MOMENTS = 6
DISASTERS = 3
STEPS_BETWEEN = 8


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_an_older_ledger_is_refused_aloud_or_goes_on_and_no_id_is_trained_on_twice(
    tmp_path: Path, seed: int
) -> None:
    run = Run(tmp_path, seed)
    run.back_up()
    for _ in range(DISASTERS):
        until = run.disk.version + STEPS_BETWEEN
        while run.disk.version < until:
            assert run.goes_on(), f"stands still at {run.disk.version}: {run.loud or 'silently'}"
            if run.draw.random() < 0.3:
                run.back_up()
        newest = run.disaster()
        run.restart()
        if not run.goes_on():
            assert run.learner is not None
            assert run.learner.refused is Reason.LEDGER_BEHIND, f"stands still silently: {run.loud!r}"
            assert run.desk is not None
            assert run.desk.accounts.gap, "the learner is refused and the status says nothing"
            run.mend(newest)
            run.restart()
            assert run.goes_on(), f"stands still after it was mended: {run.loud or 'silently'}"
        doubled = {slot: n for slot, n in Counter(run.trained_slots).items() if n > 1}
        assert doubled == {}
    run.stop_coordinator()
    assert examine(run.ledger).problems == ()
