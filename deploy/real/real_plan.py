"""Plan of a real run: its recipe, task, engines and end, and what each process adds to the recipe; pure."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section
from learner.merging.merge_settings import MergeSettings

RECIPE: Final = Path(__file__).parents[1] / "config" / "recipes" / "smollm2-cpu"

RANKING: Final = RECIPE.parent / "ranking-cpu"
NOISE_MASK: Final = RECIPE.parent / "noise-mask-cpu"

MERGE: Final = "merge"
"""Name of the port on which a learner serves contributors."""

OWN_ENGINE: Final = {RANKING: "ranking", NOISE_MASK: "noise_mask"}
"""The engine of recipes whose policy is not a language model."""

TASK_FILES: Final[Mapping[str, Path]] = {
    "jsonl": RECIPE / "word_problems.toml",
    "reasoning_gym": RECIPE / "reasoning_gym.toml",
    "ranking": RANKING / "topics.toml",
    "noise_mask": NOISE_MASK / "digits.toml",
}
"""Task -> the coordinator's keys for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run."""

    model: Path
    """The base model's directory."""
    task_file: Path
    """Configuration of the coordinator's task."""
    engines: Sequence[str]
    """Engine of each sampler."""
    seed: int
    """Seed of the order of prompts and of sampling."""
    seconds: float
    """Time for training."""
    gain: float
    """By how much the reward is to rise, in training and on held-out prompts."""
    versions: int = 0
    """Number of steps after which the learner ends by itself; 0: none."""
    vllm_python: str | None = None
    """Interpreter that has vllm; None: vllm is not at hand."""
    contributors: int = 0
    """How many train for a learner that merges; 0: the learner trains."""
    method: str = "word_changes"
    """How it merges."""

    @property
    def recipe(self) -> Path:
        """The folder with the other settings of the task's run."""
        own = self.task_file.parent
        return own if (own / "coordinator.toml").exists() else RECIPE

    @property
    def samplers(self) -> dict[str, str]:
        """Name of each sampler -> its engine."""
        return {f"sampler-{number}": engine for number, engine in enumerate(self.engines, start=1)}

    @property
    def contributor_names(self) -> tuple[str, ...]:
        """Names of the contributors."""
        return tuple(f"contributor-{number}" for number in range(1, self.contributors + 1))

    @property
    def pythons(self) -> dict[str, str]:
        """Interpreters other than this one, by process."""
        python = self.vllm_python
        return {name: python for name, engine in self.samplers.items() if engine == "vllm" and python}

    @property
    def readers(self) -> dict[str, str | None]:
        """Reader of the exported model -> its interpreter; None: this one."""
        if own := OWN_ENGINE.get(self.recipe):
            return dict.fromkeys(("transformers", f"{own}-engine"))
        with_vllm = ("vllm", "vllm-engine") if self.vllm_python else ()
        return {
            **dict.fromkeys(("transformers", "torch-engine")),
            **dict.fromkeys(with_vllm, self.vllm_python),
        }

    @property
    def recipe_files(self) -> dict[str, tuple[Path, ...]]:
        """The files that each process reads before its own."""
        return {
            COORDINATOR: (self.recipe / "coordinator.toml", self.task_file),
            LEARNER: (self.recipe / "learner.toml",),
            **dict.fromkeys(self.samplers, (self.recipe / "sampler.toml",)),
        }


def additions(plan: Plan, directory: RunDirectory, ports: Ports) -> dict[str, dict[str, Section]]:
    """Return what each process's own file adds to the recipe: places, seeds, engines."""
    model = {"model_dir": str(plan.model.resolve())}
    roles: dict[str, tuple[str, Section]] = {
        COORDINATOR: (
            "coordinator",
            {
                "listen": f"127.0.0.1:{ports.members}",
                "enrolment_listen": f"127.0.0.1:{ports.enrolment}",
                "prompt_seed": plan.seed,
            },
        ),
        LEARNER: ("learner", {**model, "max_versions": plan.versions}),
    }
    for number, (name, engine) in enumerate(plan.samplers.items()):
        seed = len(plan.engines) * plan.seed + number
        roles[name] = ("sampler", {**model, "engine": engine, "seed": seed})
    for name in plan.contributor_names:
        dialled = {"learner": f"127.0.0.1:{ports.others[MERGE]}"}
        roles[name] = ("contributor", {**model, **dialled, **_as_learner(plan)})
    documents = {
        name: {
            **directory.place(name, ports, dials=None if name == COORDINATOR else ports.members),
            role: section,
        }
        for name, (role, section) in roles.items()
    }
    if plan.contributors:
        documents[LEARNER] = documents[LEARNER] | _merging(plan, documents[LEARNER]["learner"], ports)
    return documents


def _as_learner(plan: Plan) -> Section:
    """Return the settings of a contributor's machine, which the recipe has for its learner."""
    learner = tomllib.loads((plan.recipe / "learner.toml").read_text())["learner"]
    return {"threads": 1} | {key: learner[key] for key in ("compute_dtype",) if key in learner}


def _merging(plan: Plan, learner: Section, ports: Ports) -> dict[str, Section]:
    """Return what makes a learner merge; with room for the groups that travel and those trained on."""
    merge = MergeSettings.model_validate({"method": plan.method})
    recipe = tomllib.loads((plan.recipe / "coordinator.toml").read_text())["coordinator"]
    room = plan.contributors * (2 * merge.local_steps + 2) * recipe["batch_groups"]
    listen = {"listen": f"127.0.0.1:{ports.others[MERGE]}", "method": plan.method}
    return {"learner": {**learner, "buffer_groups": room}, "learner.merge": listen}
