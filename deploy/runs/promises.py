"""The promises of every run, each as a check on its records; pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from deploy.runs.records import LedgerRecord, Step

FIRST_BATCHES: Final = 5
"""Few enough that little is learned in them."""
LAST_BATCHES: Final = 10


@dataclass(frozen=True, slots=True)
class Check:
    """A promise, whether it was kept, and the figures that show it."""

    promise: str
    is_kept: bool
    figures: str


def reward_at_first(steps: Sequence[Step]) -> float:
    """Return the mean reward of the first batches; NaN without any."""
    return _mean([step.reward_mean for step in steps[:FIRST_BATCHES]])


def reward_at_last(steps: Sequence[Step]) -> float:
    """Return the mean reward of the last batches; NaN without any."""
    return _mean([step.reward_mean for step in steps[-LAST_BATCHES:]])


def staleness_of(sampler_id: str, steps: Sequence[Step]) -> tuple[int, float]:
    """Return how many groups of a sampler were trained on, and their mean staleness (NaN if none)."""
    staleness = [g.staleness_versions for step in steps for g in step.groups if g.sampler_id == sampler_id]
    return len(staleness), _mean(staleness)


def promises_of_any_run(
    *, versions: int, steps: Sequence[Step], ledger: LedgerRecord, exit_codes: Mapping[str, int]
) -> tuple[Check, ...]:
    """Check what is promised of a run whatever it trains.

    Args:
        versions: number of steps requested.
        steps: from the learner's log.
        ledger: from the coordinator's disk.
        exit_codes: of the last incarnation of every process.
    """
    return (
        _versions_are_whole(versions, steps),
        _nothing_doubled(steps),
        _learner_and_ledger_agree(steps, ledger),
        _nothing_lost(ledger),
        _all_drained(exit_codes),
    )


def _versions_are_whole(versions: int, steps: Sequence[Step]) -> Check:
    made = [step.version for step in steps]
    return Check(
        "every version was made once, in order",
        made == list(range(1, versions + 1)),
        f"{len(made)} steps, the last made version {made[-1] if made else 0}; asked for were {versions}",
    )


def _nothing_doubled(steps: Sequence[Step]) -> Check:
    groups = [group for step in steps for group in step.groups]
    doubled = [name for name, n in Counter(group.group_id for group in groups).items() if n > 1]
    slots = [slot for slot, n in Counter(group.slot for group in groups).items() if n > 1]
    return Check(
        "no group and no slot was trained on twice",
        not doubled and not slots,
        f"{len(groups)} groups trained on, {len(doubled)} ids and {len(slots)} slots more than once",
    )


def _learner_and_ledger_agree(steps: Sequence[Step], ledger: LedgerRecord) -> Check:
    by_learner = {step.version: {group.group_id for group in step.groups} for step in steps}
    by_ledger = {version: set(group_ids) for version, group_ids in ledger.steps.items()}
    differing = [
        version
        for version in sorted(by_learner.keys() | by_ledger.keys())
        if by_learner.get(version) != by_ledger.get(version)
    ]
    groups, slots = sum(map(len, by_learner.values())), ledger.slots.get("trained", 0)
    return Check(
        "the learner's log and the ledger tell the same story",
        not differing and groups == slots,
        f"{len(differing)} of {len(by_learner)} steps differ; {groups} groups in the log, {slots} slots "
        "trained in the ledger",
    )


def _nothing_lost(ledger: LedgerRecord) -> Check:
    """Check that every group the hub took in was trained on, taught nothing, was refused or waits."""
    given: Counter[str] = sum((Counter(verdicts) for verdicts in ledger.verdicts.values()), Counter())
    refused = given["stale"] + given["suspect"]
    taught_nothing = given["uninformative"]
    waiting = ledger.slots.get("spooled", 0) + ledger.slots.get("accepted", 0)
    unwanted = given["foreign"] + given["malformed"]
    return Check(
        "no submitted group was lost",
        given["spooled"] == given["trained"] + taught_nothing + refused + waiting and not unwanted,
        f"{given['spooled']} spooled = {given['trained']} trained + {taught_nothing} that taught nothing + "
        f"{refused} refused + {waiting} waiting; "
        f"{unwanted} foreign or malformed, {ledger.slots.get('abandoned', 0)} slots abandoned",
    )


def _all_drained(exit_codes: Mapping[str, int]) -> Check:
    return Check(
        "every process drained",
        bool(exit_codes) and not any(exit_codes.values()),
        ", ".join(f"{name} {code}" for name, code in exit_codes.items()),
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")
