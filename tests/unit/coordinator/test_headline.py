"""The first line of the status: the one cause that hides the others."""

from dataclasses import replace
from typing import Any

import pytest

from node.coordinator.fleet.headline import Facts, headline
from node.run import Headline

TRAINING = Facts(
    version=7,
    version_for_s=30.0,
    started_for_s=1000.0,
    ledger_gap="",
    is_confirmed=True,
    is_task_known=True,
    live_learners=1,
    learner_unheard_s=1.0,
    learner_waits_for="",
    live_samplers=5,
    sampler_unheard_s=2.0,
    idle_s=0.0,
    capacity_groups=3,
    capacity_bound="staleness",
    ready_groups=8,
    batch_groups=8,
)


@pytest.mark.parametrize(
    ("changes", "waits_for", "for_s"),
    [
        ({}, "", 30.0),
        ({"ledger_gap": "steps 3 to 5", "live_learners": 0}, "the newest ledger", 1000.0),
        ({"live_learners": 0, "live_samplers": 0}, "the learner, which is not heard of", 1.0),
        ({"live_learners": 0, "learner_unheard_s": None}, "a learner", 1000.0),
        ({"live_samplers": 0, "sampler_unheard_s": 50.0, "idle_s": 5.0}, "samplers", 50.0),
        ({"live_samplers": 0, "sampler_unheard_s": None}, "samplers", 1000.0),
        ({"is_confirmed": False, "is_task_known": False}, "the learner to find the ledger whole", 1000.0),
        ({"is_task_known": False}, "samplers to agree how many prompts the task has", 1000.0),
        ({"idle_s": 600.0, "ready_groups": 0}, "a group that teaches something", 600.0),
        ({"ready_groups": 3}, "groups: 3 of 8 are ready", 30.0),
        ({"capacity_groups": 0, "learner_waits_for": "disk"}, "the learner, which waits for disk", 30.0),
        ({"capacity_groups": 0}, "the learner: room is bound by staleness", 30.0),
    ],
)
def test_the_cause_that_hides_the_others_is_named_with_the_time_it_lasts(
    changes: dict[str, Any], waits_for: str, for_s: float
) -> None:
    found = headline(replace(TRAINING, **changes))
    assert (found.waits_for, found.for_s) == (waits_for, for_s)


def test_before_the_first_version_there_is_none() -> None:
    assert headline(replace(TRAINING, version=None, live_learners=0)) == Headline(
        "5 samplers go on with no version yet", "the learner, which is not heard of", 1.0
    )
