"""The demo's promises beyond ``promises_of_any_run``, each as a check on its steps; pure."""

from collections.abc import Sequence
from typing import Final

from deploy.demo.plan import FAR
from deploy.runs.promises import (
    FIRST_BATCHES,
    LAST_BATCHES,
    Check,
    reward_at_first,
    reward_at_last,
    staleness_of,
)
from deploy.runs.records import Step

REWARD_AT_FIRST: Final = 0.5
REWARD_AT_LAST: Final = 0.8
FAR_STALENESS_VERSIONS: Final = 4.0


def promises_of_the_demo(steps: Sequence[Step]) -> tuple[Check, ...]:
    """Check that the run learned something, with the help of a late sampler."""
    return (_reward_rose(steps), _far_sampler_took_part(steps))


def _reward_rose(steps: Sequence[Step]) -> Check:
    first, last = reward_at_first(steps), reward_at_last(steps)
    return Check(
        "the reward rises",
        first <= REWARD_AT_FIRST and last >= REWARD_AT_LAST,
        f"{first:.3f} over the first {FIRST_BATCHES} batches (at most {REWARD_AT_FIRST}), "
        f"{last:.3f} over the last {LAST_BATCHES} (at least {REWARD_AT_LAST})",
    )


def _far_sampler_took_part(steps: Sequence[Step]) -> Check:
    groups, _ = staleness_of(FAR, steps)
    # With the near one killed nobody overtakes the far one: the learner waits for its groups.
    shared = [step for step in steps if any(group.sampler_id != FAR for group in step.groups)]
    _, staleness = staleness_of(FAR, shared)
    return Check(
        "the far sampler's groups arrive late and are trained on",
        groups > 0 and staleness >= FAR_STALENESS_VERSIONS,
        f"{groups} groups; {staleness:.2f} versions stale on average (at least {FAR_STALENESS_VERSIONS:g}), "
        "counting the steps that the near one had a part in",
    )
