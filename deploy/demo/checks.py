"""The promises of the demo, each as a check on the records of the run; pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from deploy.demo.plan import FAR
from deploy.runs.promises import (
    FIRST_BATCHES,
    LAST_BATCHES,
    Check,
    promises_of_any_run,
    reward_at_first,
    reward_at_last,
    staleness_of,
)
from deploy.runs.records import LedgerRecord, Step

REWARD_AT_FIRST: Final = 0.5
REWARD_AT_LAST: Final = 0.8
FAR_STALENESS_VERSIONS: Final = 4.0


def evaluate(
    *, versions: int, steps: Sequence[Step], ledger: LedgerRecord, exit_codes: Mapping[str, int]
) -> tuple[Check, ...]:
    """Check every promise of a run, with or without faults, against its records.

    Args:
        versions: number of steps requested.
        steps: from the learner's log.
        ledger: from the coordinator's disk.
        exit_codes: of the last incarnation of every process.
    """
    return (
        _reward_rose(steps),
        _far_sampler_took_part(steps),
        *promises_of_any_run(versions=versions, steps=steps, ledger=ledger, exit_codes=exit_codes),
    )


def _reward_rose(steps: Sequence[Step]) -> Check:
    first, last = reward_at_first(steps), reward_at_last(steps)
    return Check(
        "the reward rises",
        first <= REWARD_AT_FIRST and last >= REWARD_AT_LAST,
        f"{first:.3f} over the first {FIRST_BATCHES} batches (promised: at most {REWARD_AT_FIRST}), "
        f"{last:.3f} over the last {LAST_BATCHES} (at least {REWARD_AT_LAST})",
    )


def _far_sampler_took_part(steps: Sequence[Step]) -> Check:
    groups, staleness = staleness_of(FAR, steps)
    return Check(
        "the far sampler is late and trained on",
        groups > 0 and staleness >= FAR_STALENESS_VERSIONS,
        f"{groups} groups, {staleness:.2f} versions stale in the mean (at least {FAR_STALENESS_VERSIONS:g})",
    )
