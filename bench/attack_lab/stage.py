"""A run of coordinator, learner and two samplers, to be attacked; real processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench.attack_lab.task import CoinTask
from bench.shared.demo_run import DemoRun
from deploy.runs.processes import Children
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section
from node.coordinator.ledger.ledger_check import facts_in, reading
from node.coordinator.work.terms.model_check import Learner

SAMPLERS: Final = ("sampler-1", "sampler-2")

TASK: Final = "coin"
GROUP_SIZE: Final = 4
MAX_NEW_TOKENS: Final = 8
CONCURRENCY_GROUPS: Final = 72
EVALUATION: Final = {"every_versions": 20, "prompts": 8}


class Stage(DemoRun):
    """One run below ``root``. The caller ends the children that are left."""

    def __init__(self, root: Path, *, children: Children) -> None:
        super().__init__(root, children=children, samplers=SAMPLERS)
        self.run_id = root.name

    async def begin(self, model: Path) -> None:
        """Make the run on ``model`` and bring every process up.

        Raises:
            ChildError: one did not come up.
        """
        await self.make(model, self._sections())
        await self.start_others()

    def pid(self, name: str) -> int:
        """Return the process id of a daemon."""
        return self._children.pid(name)

    def learner(self) -> Learner:
        """Return what the learner said of the run's model, which every member knows."""
        with reading(self.directory.ledger) as connection:
            return next(facts_in(connection, Learner))

    def _sections(self) -> dict[str, Mapping[str, Section]]:
        coordinator: Section = {
            "task": TASK,
            "prompts": CoinTask.prompts,
            "group_size": GROUP_SIZE,
            "batch_groups": 8,
            "max_staleness_versions": 32,
            "max_new_tokens": MAX_NEW_TOKENS,
            "heartbeat_interval_s": 0.5,
            "silent_after_s": 3.0,
            "lease_ttl_s": 5.0,
            "concurrency_groups": CONCURRENCY_GROUPS,
            "buffer_groups": 96,
        }
        sections: dict[str, Mapping[str, Section]] = {
            COORDINATOR: {"coordinator": coordinator, "coordinator.evaluation": EVALUATION},
            LEARNER: {"learner": {"learning_rate": 1e-5}},
        }
        for seed, name in enumerate(SAMPLERS):
            sampler = {"seed": seed, "concurrency_groups": 16}
            sections[name] = {
                "sampler": sampler,
                "sampler.custom_tasks": {TASK: f"{CoinTask.__module__}:{CoinTask.__name__}"},
            }
        return sections
