"""Who takes part, where each one's files are, and a configuration for each; pure.

    learner --> coordinator <--link-- relay <--link-- sampler-1, sampler-2 (control goes straight)
                                        ^
                                        `-- groups; the coordinator is the samplers' last resort for weights

    learner <--------------- contributor-1          with contributors, half of the fleet is on the links' far
            <--link--------- contributor-2          side: they, their samplers and the relay can be cut off

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
MERGES: Final = "merges"
"""Names the port on which the learner serves contributors."""
MERGE_LINK: Final = "merge-link"

LINK_FLAGS: Final = ("--delay-ms", "20", "--jitter-ms", "5", "--rate-mbit", "16")
"""A step's delta takes some tenths of a second, a keyframe six."""

LEARNING_RATE: Final = 1e-3
WEIGHT_DECAY: Final = 0.5
"""Together: every parameter shrinks by 5e-4 a step. From the first few versions on that moves about a
tenth of all bfloat16 words at each."""

KEYFRAME_EVERY_VERSIONS: Final = 12

CHECKPOINT_EVERY_VERSIONS: Final = 20
"""The default: kills come more often than that, so most restarts take steps again."""

MEMBER_TIMEOUT_S: Final = 3.0
"""About what a contributor takes to start again: its groups are taken back before or after that."""

FRAMES: Final = 8
"""Enough to be killed among."""

FRAMES_OF_RANKS: Final = 2
"""Ranks exchange all of them at every step."""

FRAMES_OF_CONTRIBUTORS: Final = 1
"""They send 4 bytes a parameter where changes are not compressed."""

RANK_TIMEOUT_S: Final = 60

KILLED: Final = ("sampler", "relay", "learner")
"""Roles whose processes are killed by default."""

MERGING: Final = ("learner", "contributor")
"""Roles whose processes are killed by default where the learner merges."""

METHODS: Final[Mapping[str, Section]] = {
    "in_step": {},
    "decoupled": {"local_steps": 2, "grace_s": 0.5},
    "word_changes": {"local_steps": 2, "quorum": 0.5, "grace_s": 0.5},
    "diloco": {"local_steps": 2},
}
"""Ways to merge: all and exactly; some, coded, and late; words; with momentum."""

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
    contributors: tuple[str, ...] = ()
    """The peers whose steps the learner merges; none: it takes steps itself."""
    method: str = ""
    """How it does, a key of ``METHODS``."""

    @property
    def far(self) -> tuple[str, ...]:
        """Peers on the far side of the links, which can be cut off together."""
        if not self.contributors:
            return (RELAY,)
        return (RELAY, *self.samplers[1::2], *self.contributors[1::2])

    @property
    def links(self) -> tuple[str, ...]:
        return () if self.ranks > 1 else (HUB_LINK, RELAY_LINK, *([MERGE_LINK] if self.contributors else []))

    @property
    def daemons(self) -> tuple[str, ...]:
        return (COORDINATOR, LEARNER, *self.enrolled)

    @property
    def enrolled(self) -> tuple[str, ...]:
        """Peers that enrol with a token; ``init`` makes the other identities."""
        return self.samplers if self.ranks > 1 else (RELAY, *self.samplers, *self.contributors)


def configurations(plan: Plan, directory: RunDirectory, ports: Ports) -> dict[str, dict[str, Section]]:
    """Return the configuration of each daemon: process -> section -> key -> value."""
    dialled = {COORDINATOR: None} | dict.fromkeys(plan.far, ports.others[HUB_LINK])
    documents = {}
    for name in plan.daemons:
        document = directory.place(name, ports, dials=dialled.get(name, ports.members))
        # The witness reads of every group that was handed in.
        document["telemetry"] = {**document["telemetry"], "log_level": "debug"}
        document[role_of(name)] = _section(name, plan, ports, str(directory.model))
        if name == COORDINATOR:
            document["coordinator.task_options"] = {"pause_s": plan.pause_s}
        if name == LEARNER and plan.contributors:
            document["learner.merge"] = {
                **{"method": plan.method, **METHODS[plan.method]},
                **{"listen": f"127.0.0.1:{ports.others[MERGES]}", "restart_wait_s": 5.0},
                "member_timeout_s": MEMBER_TIMEOUT_S,
            }
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
                "buffer_groups": 16 * max(1, len(plan.contributors)),
            }
        case "learner":
            return {
                "model_dir": model_dir,
                "learning_rate": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
                "buffer_groups": max(8, 16 * len(plan.contributors)),
                "keyframe_every_versions": KEYFRAME_EVERY_VERSIONS,
                "checkpoint_every_versions": CHECKPOINT_EVERY_VERSIONS,
                "threads": 1,
                "dp_shard": plan.ranks,
                "rank_timeout_s": RANK_TIMEOUT_S,
            }
        case "relay":
            return {"listen": f"127.0.0.1:{ports.others[RELAY]}"}
        case "contributor":
            learner, relays = ports.others[MERGES], []
            if name in plan.far:
                learner, relays = ports.others[MERGE_LINK], [f"127.0.0.1:{ports.others[RELAY]}"]
            place = {"learner": f"127.0.0.1:{learner}", "relays": relays}
            return place | {"model_dir": model_dir, "threads": 1}
        case _:
            by_relay = {
                "weight_sources": [f"127.0.0.1:{ports.others[RELAY_LINK]}"],
                "relays": [f"127.0.0.1:{ports.others[RELAY]}"],
            }
            is_behind = RELAY in plan.enrolled and (name in plan.far or not plan.contributors)
            return (by_relay if is_behind else {}) | {
                "model_dir": model_dir,
                "seed": plan.seed + plan.samplers.index(name),
                "concurrency_groups": 4,
                "threads": 1,
                # The first puts versions together in a second copy, the others write over the one they have.
                "apply": "spare" if name == plan.samplers[0] else "in_place",
                # Often: a copy being written is a moment to be killed at.
                "save_policy_every_s": 2.0,
            }
