"""A demo that is right whatever happens proves nothing: each promise is broken here, alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deploy.demo.checks import promises_of_the_demo
from deploy.demo.plan import FAR, NEAR
from deploy.runs.promises import promises_of_any_run
from deploy.runs.records import LedgerRecord, Step, Trained
from support.demo_records import ledger_of, make_step, make_steps

DRAINED = {"coordinator": 0, "learner": 0}


def _broken(
    steps: Sequence[Step], *, ledger: LedgerRecord | None = None, exit_codes: dict[str, int] | None = None
) -> list[str]:
    of_any_run = promises_of_any_run(
        versions=30,
        steps=steps,
        ledger=ledger or ledger_of(steps),
        exit_codes=DRAINED if exit_codes is None else exit_codes,
    )
    checks = (*promises_of_the_demo(steps), *of_any_run)
    return [check.promise for check in checks if not check.is_kept]


def test_a_run_that_went_well_keeps_every_promise() -> None:
    assert _broken(make_steps()) == []


def _rewarded(first: float, last: float) -> list[Step]:
    return [make_step(v, reward=first if v <= 10 else last) for v in range(1, 31)]


def _with_groups(change: Callable[[Trained], Trained], *, after: int = 0) -> list[Step]:
    return [
        replace(step, groups=tuple(map(change, step.groups))) if step.version > after else step
        for step in make_steps()
    ]


def _with_far(**changes: Any) -> list[Step]:
    return _with_groups(lambda group: replace(group, **changes) if group.sampler_id == FAR else group)


def _without(place: int) -> list[Step]:
    return [step for number, step in enumerate(make_steps()) if number != place]


def _with_slot_again(attempt: int) -> list[Step]:
    steps = make_steps()
    again = Trained(f"{steps[3].groups[1].slot}.{attempt}", FAR, 6)
    steps[20] = replace(steps[20], groups=(steps[20].groups[0], again))
    return steps


BROKEN = {
    "the reward rises": [
        *(_rewarded(first, 0.9) for first in (0.51, float("nan"))),
        *(_rewarded(0.4, last) for last in (0.79, float("nan"))),
    ],
    "the far sampler's groups arrive late and are trained on": [
        _with_far(staleness_versions=0),
        _with_far(staleness_versions=3),
        _with_far(sampler_id=NEAR),
    ],
    "every version was made once, in order": [_without(place) for place in (0, 15, 29)],
    "no group and no slot was trained on twice": [_with_slot_again(attempt) for attempt in (1, 2)],
}
"""Promise -> steps that break it alone."""


@pytest.mark.parametrize("promise", BROKEN)
def test_a_promise_that_is_broken_is_named_alone(promise: str) -> None:
    for steps in BROKEN[promise]:
        assert _broken(steps) == [promise]


def test_while_the_near_sampler_is_dead_the_far_one_need_not_be_late() -> None:
    assert _broken(_with_groups(lambda g: replace(g, sampler_id=FAR, staleness_versions=0), after=5)) == []


def test_a_step_that_the_ledger_knows_otherwise_is_found() -> None:
    steps = make_steps()
    ledger = ledger_of(steps)
    swapped = {**ledger.steps, 3: ledger.steps[4], 4: ledger.steps[3]}
    assert _broken(steps, ledger=replace(ledger, steps=swapped)) == [
        "the learner's log and the ledger tell the same story"
    ]


@pytest.mark.parametrize("changes", [{"spooled": 3}, {"foreign": 1}], ids=["never heard of again", "foreign"])
def test_a_group_that_is_lost_or_that_only_a_fault_can_make_foreign_is_found(changes: dict[str, int]) -> None:
    ledger = ledger_of(make_steps())
    verdicts = {**ledger.verdicts, FAR: {**ledger.verdicts[FAR], **changes}}
    assert _broken(make_steps(), ledger=replace(ledger, verdicts=verdicts)) == ["no submitted group was lost"]


@pytest.mark.parametrize("exit_codes", [{}, {"coordinator": 0, "learner": 1}, {"coordinator": -9}])
def test_a_process_that_did_not_drain_breaks_the_promise(exit_codes: dict[str, int]) -> None:
    assert _broken(make_steps(), exit_codes=exit_codes) == ["every process drained"]


def test_a_run_without_a_step_is_judged_and_not_crashed_on() -> None:
    assert "the reward rises" in _broken([], ledger=LedgerRecord({}, {}, {}, {}))
