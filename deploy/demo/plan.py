"""The demo's numbers, its directory, and the configuration of each process; pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

COORDINATOR: Final = "coordinator"
LEARNER: Final = "learner"
NEAR: Final = "sampler-1"
"""On the coordinator's own network."""
FAR: Final = "sampler-2"
"""Behind the emulated link."""
LINK: Final = "link"
SAMPLERS: Final = (NEAR, FAR)

BASE_ACCURACY: Final = 0.36
"""Accuracy of the base model: enough right answers to learn from. Training starts at up to 0.41, and the mean
of the first batches, which varies by 0.04, must stay below 0.5."""

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

Section = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a demo."""

    seed: int
    versions: int
    has_chaos: bool


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run; each peer has a state directory of its own."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def coordinator_state(self) -> Path:
        """The directory that ``heterorl-node init`` makes."""
        return self.state(COORDINATOR)

    @property
    def run_file(self) -> Path:
        return self.coordinator_state / "run.json"

    @property
    def ledger(self) -> Path:
        return self.coordinator_state / "coordinator" / "ledger.sqlite"

    @property
    def step_log(self) -> Path:
        return self.state(LEARNER) / "learner" / "steps.jsonl"

    def state(self, name: str) -> Path:
        return self.root / "state" / name

    def token(self, name: str) -> Path:
        return self.state(name) / "token"

    def config(self, name: str) -> Path:
        return self.root / "config" / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on the loopback interface, each used by one process."""

    members: int
    enrolment: int
    link: int
    telemetry: Mapping[str, int]
    """By process."""


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
    dialled = {COORDINATOR: {}, FAR: {"coordinator": f"127.0.0.1:{ports.link}"}}
    direct = {"coordinator": f"127.0.0.1:{ports.members}"}
    return {
        name: {
            "node": {
                "state_dir": str(directory.state(name)),
                "run_file": str(directory.run_file),
                **dialled.get(name, direct),
                **({"node_id": name, "token_file": str(directory.token(name))} if name in SAMPLERS else {}),
            },
            "telemetry": {"http_listen": f"127.0.0.1:{ports.telemetry[name]}", "log_format": "json"},
            role: section,
        }
        for name, (role, section) in roles.items()
    }


def to_toml(document: Mapping[str, Section]) -> str:
    """Return sections of text, numbers and booleans as TOML, which writes those as JSON does."""
    blocks = (
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())])
        for name, section in document.items()
    )
    return "\n\n".join(blocks) + "\n"
