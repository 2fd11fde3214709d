"""The demo's numbers and the configuration of each process; pure."""

from dataclasses import dataclass
from typing import Final

from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section

NEAR: Final = "sampler-1"
"""On the coordinator's own network."""
FAR: Final = "sampler-2"
"""Behind the emulated link."""
LINK: Final = "link"
SAMPLERS: Final = (NEAR, FAR)

BASE_ACCURACY: Final = 0.36
"""Accuracy of the base model: enough right answers to learn from. Training starts at up to 0.41, and the mean
of the first batches, which varies by 0.04, must stay below 0.5."""

MODEL_WIDTH: Final = 64
"""150 000 parameters: a step takes tens of milliseconds on one core."""

BATCH_GROUPS: Final = 24
GROUP_SIZE: Final = 8
LEARNING_RATE: Final = 1e-3
"""With this batch and half of the groups 6 to 12 versions stale, six of six simulated seeds were above 0.85
after 100 versions; half the batch took 130, twice the rate lost the first 20."""

MAX_STALENESS_VERSIONS: Final = 32

KEYFRAME_EVERY_VERSIONS: Final = 10
"""The far sampler follows a chain of deltas at two round trips each, slower than they are made, and jumps
to the head where a keyframe costs less than the rest of the chain."""

LINK_FLAGS: Final = ("--delay-ms", "100", "--jitter-ms", "20", "--rate-mbit", "8")
"""One way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a demo."""

    seed: int
    versions: int
    has_chaos: bool


def configurations(plan: Plan, directory: RunDirectory, ports: Ports) -> dict[str, dict[str, Section]]:
    """Return the configuration of each daemon: process -> section -> key -> value."""
    model = {"model_dir": str(directory.model), "threads": 1}
    roles: dict[str, tuple[str, Section]] = {
        COORDINATOR: (
            "coordinator",
            {
                "listen": f"127.0.0.1:{ports.members}",
                "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
                "task": "addition",
                "prompt_seed": plan.seed,
                "group_size": GROUP_SIZE,
                "batch_groups": BATCH_GROUPS,
                "max_staleness_versions": MAX_STALENESS_VERSIONS,
                "max_new_tokens": 4,
                "heartbeat_interval_s": 0.5,
                "silent_after_s": 3.0,
                "lease_ttl_s": 5.0,
                "concurrency_groups": 3 * BATCH_GROUPS,
                "buffer_groups": 4 * BATCH_GROUPS,
            },
        ),
        LEARNER: (
            "learner",
            {
                **model,
                "learning_rate": LEARNING_RATE,
                "buffer_groups": 2 * BATCH_GROUPS,
                "keyframe_every_versions": KEYFRAME_EVERY_VERSIONS,
                "max_versions": plan.versions,
            },
        ),
        NEAR: ("sampler", {**model, "seed": 2 * plan.seed, "concurrency_groups": 16}),
        FAR: ("sampler", {**model, "seed": 2 * plan.seed + 1, "concurrency_groups": 16, "apply": "in_place"}),
    }
    dialled = {COORDINATOR: None, FAR: ports.others[LINK]}
    return {
        name: {**directory.place(name, ports, dials=dialled.get(name, ports.members)), role: section}
        for name, (role, section) in roles.items()
    }
