"""Who takes part, where each one's files are, and a configuration for each; pure.

    learner --> coordinator <--link-- relay <--link-- sampler-1, sampler-2 (control goes straight)
                                        ^
                                        `-- groups; the coordinator is the samplers' last resort for weights

The links are slow enough for a version to be under way for a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.kill_lab.task import EvenDigitsTask
from deploy.runs.run_directory import Section

COORDINATOR: Final = "coordinator"
LEARNER: Final = "learner"
RELAY: Final = "relay-1"
HUB_LINK: Final = "hub-link"
RELAY_LINK: Final = "relay-link"

LINK_FLAGS: Final = ("--delay-ms", "20", "--jitter-ms", "5", "--rate-mbit", "16")
"""A step's delta takes some tenths of a second, a keyframe six."""

LEARNING_RATE: Final = 1e-3
WEIGHT_DECAY: Final = 0.5
"""Together: every parameter shrinks by 5e-4 a step. From the first few versions on that moves about a
tenth of all bfloat16 words at each."""

KEYFRAME_EVERY_VERSIONS: Final = 12

_TASK: Final = "even-digits"
_TASKS: Final[Section] = {_TASK: f"{EvenDigitsTask.__module__}:{EvenDigitsTask.__name__}"}


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on the loopback interface, each used by one process."""

    members: int
    enrolment: int
    relay: int
    hub_link: int
    relay_link: int
    telemetry: Mapping[str, int]
    """By process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for."""

    kills: int
    seed: int
    samplers: tuple[str, ...]

    @property
    def daemons(self) -> tuple[str, ...]:
        return (COORDINATOR, LEARNER, RELAY, *self.samplers)

    @property
    def enrolled(self) -> tuple[str, ...]:
        """Those that come in with a token; ``init`` makes the other identities."""
        return (RELAY, *self.samplers)


def role_of(name: str) -> str:
    """Return the role of a process from its name."""
    return name.partition("-")[0]


def configurations(
    plan: Plan, ports: Ports, *, model: Path, run_file: Path, state: Mapping[str, Path]
) -> dict[str, dict[str, Section]]:
    """Return the configuration of each daemon: process -> section -> key -> value."""
    return {
        name: {
            "node": {
                "state_dir": str(state[name]),
                "run_file": str(run_file),
                **_way_to_the_hub(name, ports),
                **(
                    {"node_id": name, "token_file": str(state[name] / "token")}
                    if name in plan.enrolled
                    else {}
                ),
            },
            "telemetry": {
                "http_listen": f"127.0.0.1:{ports.telemetry[name]}",
                "log_format": "json",
                # The witness reads of every group that was handed in.
                "log_level": "debug",
            },
            role_of(name): _section(name, plan, ports, model),
            **({"sampler.custom_tasks": _TASKS} if name in plan.samplers else {}),
        }
        for name in plan.daemons
    }


def _way_to_the_hub(name: str, ports: Ports) -> Section:
    if name == COORDINATOR:
        return {}
    return {"coordinator": f"127.0.0.1:{ports.hub_link if name == RELAY else ports.members}"}


def _section(name: str, plan: Plan, ports: Ports, model: Path) -> Section:
    match role_of(name):
        case "coordinator":
            return {
                "listen": f"127.0.0.1:{ports.members}",
                "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
                "task": _TASK,
                "prompts": EvenDigitsTask.prompts,
                "prompt_seed": plan.seed,
                "group_size": 4,
                "batch_groups": 4,
                "max_staleness_versions": 64,
                "max_new_tokens": 4,
                "heartbeat_interval_s": 0.25,
                "silent_after_s": 3.0,
                "lease_ttl_s": 3.0,
                "concurrency_groups": 8 * len(plan.samplers),
                "buffer_groups": 16,
            }
        case "learner":
            return {
                "model_dir": str(model),
                "learning_rate": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
                "buffer_groups": 8,
                "keyframe_every_versions": KEYFRAME_EVERY_VERSIONS,
                "threads": 1,
            }
        case "relay":
            return {"listen": f"127.0.0.1:{ports.relay}"}
        case _:
            return {
                "model_dir": str(model),
                "seed": plan.seed + plan.samplers.index(name),
                "concurrency_groups": 4,
                "threads": 1,
                "weight_sources": [f"127.0.0.1:{ports.relay_link}"],
                "rollout_via": f"127.0.0.1:{ports.relay}",
                # The first puts versions together in a second copy, the others write over the one they have.
                "apply": "spare" if name == plan.samplers[0] else "in_place",
                # Often: a copy being written is a moment to be killed at.
                "save_policy_every_s": 2.0,
            }
