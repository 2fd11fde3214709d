"""A run of the demo's task some of whose samplers lie, and what became of their lies."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from bench.cheat_lab.lies import Cheat
from bench.cheat_lab.lying_node import environment
from bench.shared.demo_run import DemoRun
from deploy.runs.processes import Children
from deploy.runs.records import StepTail, read_ledger
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section
from node.coordinator.work.samplers.sampler_standing import Standing


@dataclass(frozen=True, slots=True)
class Caught:
    """The fate of lies, by the ledger of a run that has ended."""

    told: Mapping[str, Mapping[str, float]]
    """Liar -> groups it lied about -> Unix seconds."""
    trained: Set[str]
    """Groups that were trained on."""
    shut_out: Mapping[str, Standing]
    """Samplers in quarantine."""
    verdicts: Mapping[str, Mapping[str, int]]
    """Sampler -> verdict -> groups."""

    @property
    def lies(self) -> int:
        return sum(map(len, self.told.values()))

    @property
    def trained_on(self) -> int:
        """Return how many lies were trained on."""
        return sum(len(self.trained & groups.keys()) for groups in self.told.values())


class CheatedRun(DemoRun):
    """One run below ``root``. The caller ends the children that are left."""

    def __init__(
        self,
        root: Path,
        *,
        children: Children,
        samplers: Sequence[str],
        verifiers: Sequence[str],
        cheats: Mapping[str, Cheat],
        seed: int,
    ) -> None:
        """Prepare a run in which the samplers of ``cheats`` lie; nothing is written yet."""
        super().__init__(root, children=children, samplers=samplers, verifiers=verifiers)
        self.cheats = cheats
        self.seed = seed

    def changes(self, batch_groups: int) -> dict[str, Mapping[str, Section]]:
        """Return what is other than in the demo for coordinator and learner: process -> section -> keys."""
        coordinator: Section = {
            "prompt_seed": self.seed,
            "batch_groups": batch_groups,
            "heartbeat_interval_s": 0.5,
            "lease_ttl_s": 20.0,
            "concurrency_groups": 3 * batch_groups,
            "buffer_groups": 4 * batch_groups,
        }
        return {
            COORDINATOR: {"coordinator": coordinator},
            LEARNER: {"learner": {"buffer_groups": 2 * batch_groups}},
        }

    async def start_sampler(self, name: str) -> None:
        """Start a sampler, which lies if it has a cheat, and wait until it serves."""
        if name not in self.cheats:
            await self.start(name, environ={})
            return
        league = self.directory.root / "league"
        environ = environment(self.cheats[name], lies=self._lies(name), league=league)
        await self.start(name, environ=environ, module=environment.__module__)

    def caught(self) -> Caught:
        """Read the ledger of the run, which has been drained."""
        ledger = read_ledger(self.directory.ledger, run_id=self.directory.run_id)
        return Caught(
            told={name: self._told(name) for name in self.cheats},
            trained={group_id for group_ids in ledger.steps.values() for group_id in group_ids},
            shut_out=self.shut_out(),
            verdicts=ledger.verdicts,
        )

    def steps(self) -> StepTail:
        """Return the learner's log of steps."""
        return StepTail(self.directory.step_log)

    def _told(self, name: str) -> dict[str, float]:
        path = self._lies(name)
        lines = path.read_text().splitlines() if path.exists() else []
        return {group_id: float(at_s) for group_id, at_s in map(str.split, lines)}

    def _lies(self, name: str) -> Path:
        return self.directory.root / f"{name}.lies"
