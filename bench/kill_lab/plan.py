"""Who takes part, where each one's files are, and a configuration for each; pure.

    learner --> coordinator <--link-- relay <--link-- sampler-1, sampler-2 (control goes straight)
                                        ^
                                        `-- groups; the coordinator is the samplers' last resort for weights

The links are slow enough for a version to be under way for a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bench.kill_lab.task import EvenDigitsTask, RankedDigitsTask
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section, role_of
from node.kinds.registry import CAUSAL_LM

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

CHECKPOINT_EVERY_VERSIONS: Final = 20
"""The default: kills come more often than that, so most restarts take steps again."""

FRAMES: Final = 8
"""Enough to be killed among."""

FRAMES_OF_RANKS: Final = 2
"""Ranks exchange all of them at every step."""

RANK_TIMEOUT_S: Final = 60

KILLED: Final = ("sampler", "relay", "learner")
"""Roles whose processes are killed by default."""

TASKS: Final[Mapping[str, type[EvenDigitsTask]]] = {
    CAUSAL_LM.name: EvenDigitsTask,
    "ranking": RankedDigitsTask,
}

_TASK: Final = "kill-lab"


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a campaign."""

    kills: int
    seed: int
    samplers: tuple[str, ...]
    ranks: int = 1
    """Ranks of the learner. With more than one, only ranks are killed, and the run has no relay."""
    frames: int = FRAMES
    """Size of the model."""
    pause_s: float = 0.0
    """Taken to grade a completion; a run of many cores has none."""
    policy: str = CAUSAL_LM.name
    """The kind of what is trained."""
    roles: tuple[str, ...] = KILLED
    """Roles whose processes are killed, as often each; not asked where ranks are."""

    @property
    def daemons(self) -> tuple[str, ...]:
        return (COORDINATOR, LEARNER, *self.enrolled)

    @property
    def enrolled(self) -> tuple[str, ...]:
        """Peers that enrol with a token; ``init`` makes the other identities."""
        return self.samplers if self.ranks > 1 else (RELAY, *self.samplers)


def configurations(plan: Plan, directory: RunDirectory, ports: Ports) -> dict[str, dict[str, Section]]:
    """Return the configuration of each daemon: process -> section -> key -> value."""
    dialled = {COORDINATOR: None, RELAY: ports.others[HUB_LINK]}
    documents = {}
    for name in plan.daemons:
        document = directory.place(name, ports, dials=dialled.get(name, ports.members))
        # The witness reads of every group that was handed in.
        document["telemetry"] = {**document["telemetry"], "log_level": "debug"}
        document[role_of(name)] = _section(name, plan, ports, str(directory.model))
        if name == COORDINATOR:
            document["coordinator.task_options"] = {"pause_s": plan.pause_s}
        if name in plan.samplers:
            task = TASKS[plan.policy]
            document["sampler.custom_tasks"] = {_TASK: f"{task.__module__}:{task.__name__}"}
        documents[name] = document
    return documents


def _section(name: str, plan: Plan, ports: Ports, model_dir: str) -> Section:
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
                "model_dir": model_dir,
                "learning_rate": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
                "buffer_groups": 8,
                "keyframe_every_versions": KEYFRAME_EVERY_VERSIONS,
                "checkpoint_every_versions": CHECKPOINT_EVERY_VERSIONS,
                "threads": 1,
                "dp_shard": plan.ranks,
                "rank_timeout_s": RANK_TIMEOUT_S,
            }
        case "relay":
            return {"listen": f"127.0.0.1:{ports.others[RELAY]}"}
        case _:
            by_relay = {
                "weight_sources": [f"127.0.0.1:{ports.others[RELAY_LINK]}"],
                "relays": [f"127.0.0.1:{ports.others[RELAY]}"],
            }
            return (by_relay if RELAY in plan.enrolled else {}) | {
                "model_dir": model_dir,
                "seed": plan.seed + plan.samplers.index(name),
                "concurrency_groups": 4,
                "threads": 1,
                # The first puts versions together in a second copy, the others write over the one they have.
                "apply": "spare" if name == plan.samplers[0] else "in_place",
                # Often: a copy being written is a moment to be killed at.
                "save_policy_every_s": 2.0,
            }
