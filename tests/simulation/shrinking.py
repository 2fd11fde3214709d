"""A failing run made short: fewer faults, shorter ones, told in words.

Delta debugging over the list of faults (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input", 2002): parts of the list are left out as long as the run still breaks the same rule. Then what is
left is made as short as it can be, and the run as small.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from simulation.faults import Fault, Plan
from simulation.outcome import Outcome
from simulation.world import simulate

RUNS = 120
"""Most runs for one story."""


def rule_of(violation: str) -> str:
    """Return a violation without the numbers and names in which two of one kind differ."""
    return re.sub(r"[\d.]+|sampler-\w+|stranger-[\w-]+|\{.*", "#", violation)[:60]


def shrunk(outcome: Outcome, *, run: Callable[[Plan], Outcome] = simulate, runs: int = RUNS) -> Outcome:
    """Return the smallest run found that breaks the rule that ``outcome`` breaks first."""
    rule, left = rule_of(outcome.violations[0]), runs
    best = outcome

    def still_fails(plan: Plan) -> bool:
        nonlocal best, left
        if left <= 0:
            return False
        left -= 1
        tried = run(plan)
        if not tried.violations or rule_of(tried.violations[0]) != rule:
            return False
        best = tried
        return True

    _drop_faults(best.plan, still_fails)
    for simpler in _simpler(best.plan):
        still_fails(simpler)
    for place in range(len(best.plan.faults)):
        while left > 0 and still_fails(_with(best.plan, place, for_s=best.plan.faults[place].for_s / 2)):
            pass
    return best


def _drop_faults(plan: Plan, still_fails: Callable[[Plan], bool]) -> None:
    faults, parts = plan.faults, 2
    if faults and still_fails(plan.with_faults(())):
        return
    while len(faults) > 1:
        size = max(1, len(faults) // parts)
        for start in range(0, len(faults), size):
            rest = faults[:start] + faults[start + size :]
            if rest and still_fails(plan.with_faults(rest)):
                faults, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                return
            parts = min(len(faults), 2 * parts)


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with one complication less, each tried on its own."""
    simple = {
        "evaluates_every_versions": 0,
        "uninformative": 0.0,
        "verifiers_grade": False,
        "samplers": 2,
        "contributors": 1,
        "batch_groups": 1,
    }
    targets = {fault.target for fault in plan.faults}
    for name, value in simple.items():
        if name == "contributors" and not plan.contributors:
            continue
        simpler = replace(plan, **{name: value})  # type: ignore[arg-type]
        if simpler != plan and not targets & (_peers(plan) - _peers(simpler)):
            yield simpler


def _peers(plan: Plan) -> set[str]:
    return {*plan.sampler_names, *plan.contributor_names}


def _with(plan: Plan, place: int, **changes: float) -> Plan:
    faults: tuple[Fault, ...] = plan.faults
    changed = replace(faults[place], **changes)  # type: ignore[arg-type]
    return plan.with_faults((*faults[:place], changed, *faults[place + 1 :]))


def told(outcome: Outcome, *, lines: int = 30) -> str:
    """Return a run in words: its size, what failed, what happened last, what was broken."""
    plan = outcome.plan
    merging = ", ".join(f"{name} {value}" for name, value in plan.merge)
    contributors = f", {plan.contributors} contributors ({merging})" if plan.contributors else ""
    size = (
        f"seed {plan.seed}: a learner{contributors}, {plan.samplers} samplers; batches of "
        f"{plan.batch_groups}, at most {plan.max_staleness_versions} versions stale, "
        f"{plan.concurrency_groups} leases, room for "
        f"{plan.buffer_groups} groups, leases of {plan.lease_ttl_s:g} s"
    )
    faults = [f"  {fault}" for fault in plan.faults] or ["  nothing"]
    story = outcome.story[-lines:]
    last = [f"  {line}" for line in story]
    broken = [f"  {violation}" for violation in outcome.violations] or ["  nothing"]
    return "\n".join(
        (size, "what fails:", *faults, "what happened last:", *last, "what was broken:", *broken)
    )
