"""One run from its plan: peers, network, disks, faults in their time, and what the witness says of it.

grows --faults begin and end--> calm: the run has to recover --> steps and groups of everybody: it has
                                             '--within RECOVERY_S not: violated
"""

import asyncio
import contextlib
import gc
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from heterorl.v1 import rollout_pb2
from node.coordinator.ledger.ledger_copies import back_up, restore
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.work.decisions.submitted_groups import Submission
from node.errors import RefusedError, StartupError
from node.values.groups.rollout import LeaseGrant, RolloutGroup
from simulation.contributor import SimulatedContributor
from simulation.disks import DiedError, SimulatedDisk
from simulation.faults import Plan
from simulation.hub import Hub, Shelf, draw_for
from simulation.inflicting import VERIFIERS, Inflictor
from simulation.learner import LearnerDisk, SimulatedLearner
from simulation.network import Network
from simulation.outcome import Line, Outcome
from simulation.recovery import recovered
from simulation.sampler import SimulatedSampler
from simulation.verifier import GRADES, SimulatedVerifier
from simulation.virtual_loop import Clock, Process, StandsStillError, VirtualLoop
from simulation.witness import Witness

GROWTH_S = 10.0
"""A run without faults is left alone for so long."""

DISCONNECTED_S = 0.3

_GRADED = rollout_pb2.GroupColumns(rewards=GRADES.rewards.tobytes()).SerializeToString()
"""The bytes that the coordinator appends to a group's columns."""

RESTART_S = 1.0
"""Until a coordinator is started again that ended before it served."""


def simulate(plan: Plan) -> Outcome:
    """Run a plan to its end, or to the first violation."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=root))
    try:
        with _quiet(), _without_collector():
            return World(plan, directory).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Collect garbage when the body is through: what is reported then does not depend on chance."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class World:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self._directory = directory
        self.loop = VirtualLoop()
        self._story: list[Line] = []
        self.reached: Counter[str] = Counter()
        self.witness = Witness(plan, self.loop, self.tell, reached=self.reached)
        self.network = Network(self.loop, plan.seed)
        self._lives: Counter[str] = Counter()
        self._clocks: dict[str, Clock] = {}
        self._groups: dict[bytes, RolloutGroup] = {}
        self._shelf = Shelf()
        self._has_lost_ledger = False
        """Whether the next coordinator begins with an older ledger, whose loss was accepted."""
        self.hub_disk = SimulatedDisk(
            directory / "hub",
            draw_for(plan.seed, "hub disk"),
            files=(FILE_NAME, f"{FILE_NAME}.accepts-loss"),
        )
        self.learner_disk = LearnerDisk()
        self.hub: Hub | None = None
        self.learner: SimulatedLearner | None = None
        self.samplers: dict[str, SimulatedSampler] = {}
        self.verifiers: dict[str, SimulatedVerifier] = {}
        self.contributors: dict[str, SimulatedContributor] = {}
        self.gone: set[str] = set()
        self.down_for_s = 1.0
        self.learner_down_for_s = 1.0
        self.options = 1
        """Which of the task's options are configured."""
        self._closers: list[Callable[[], None]] = []

    def run(self) -> Outcome:
        asyncio.set_event_loop(None)
        with contextlib.suppress(StandsStillError):
            try:
                self.loop.run_until_complete(self._main())
            except StandsStillError as error:
                self.witness.violated(str(error))
                raise
            finally:
                self._end()
        if self.loop.crash is not None:
            self.witness.violated(f"a task crashed: {self.loop.crash!r}")
        return Outcome(
            self.plan,
            tuple(dict.fromkeys(self.witness.violations)),
            tuple(self._story),
            self.reached,
            len(self.witness.history),
            self.loop.time(),
        )

    async def _main(self) -> None:
        self._start_hub()
        self._start_learner()
        for name in self.plan.sampler_names:
            self.start_sampler(name)
        for name in VERIFIERS if self.plan.verifiers_grade else ():
            self.start_verifier(name)
        for name in self.plan.contributor_names:
            self.start_contributor(name)
        inflictor = Inflictor(self)
        faults = [self.loop.create_task(inflictor.inflict(fault)) for fault in self.plan.faults]
        ends_s = max(GROWTH_S, self.plan.last_fault_s)
        while self.loop.time() < ends_s and not self.has_failed:  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(1.0)
        if not self.has_failed and faults:
            await asyncio.wait(faults)
        await recovered(self)
        if self.hub is not None and not self.has_failed:
            self.witness.at_end(self.hub)

    @property
    def has_failed(self) -> bool:
        return bool(self.witness.violations) or self.loop.crash is not None

    # Peers and their lives.

    def process(self, name: str) -> Process:
        self._lives[name] += 1
        return Process(self.loop, name, self._lives[name])

    def clock(self, name: str) -> Clock:
        return self._clocks.setdefault(name, Clock(self.loop))

    def draw(self, name: str) -> Any:
        return draw_for(self.plan.seed, f"{name}/{self._lives[name]}")

    def _start_hub(self) -> None:
        if self.hub is not None:
            return
        process, disk = self.process("coordinator"), self.hub_disk
        try:
            with process.entered():
                hub = Hub(
                    self.plan,
                    process,
                    disk,
                    clock=self.clock("coordinator"),
                    shelf=self._shelf,
                    task_digest=self.options.to_bytes(16),
                    reached=self.reached,
                    settled=self._settled,
                    granted=self._granted,
                    objected=self._objected,
                )
        except StartupError as error:
            self.witness.violated(f"the coordinator does not start again: {error}")
            return
        except (DiedError, RefusedError) as error:
            self.tell("coordinator", f"ends as it starts: {error or 'it dies in its first commit'}")
            self.loop.call_later(RESTART_S, self._start_hub)
            return
        before, after, found = disk.before, disk.after, hub.balance_at_start
        # What an operator has accepted is spent before the commit that uses it, and is to be accepted again.
        is_to_be_accepted = before is not None and before.accepts_loss and not found.accepts_loss
        if before is not None and is_to_be_accepted:
            before = replace(before, accepts_loss=False)
            is_to_be_accepted = found == before
        if before is not None and found not in (before, after):
            self.witness.violated("a commit that a death cut short is on disk in part")
        disk.before = disk.after = None
        disk.on_death = self._hub_died
        self.hub = hub
        self.tell("coordinator", "starts" if process.life == 1 else "starts again")
        if self._has_lost_ledger:
            self._has_lost_ledger = False
            self.witness.loss_accepted(hub)
        self.witness.started(hub)
        process.spawn(hub.keep_up())
        if is_to_be_accepted:
            self.loop.call_later(RESTART_S, lambda: self.restore(self.back_up()))

    def _settled(self, hub: Hub, failure: Exception | None) -> None:
        if hub is not self.hub:
            return
        if failure is None:
            self.witness.settled(hub)
        elif not hub.run_ledger._is_ahead:
            self.tell("coordinator", "cannot write its ledger")
            self.witness.went_back(hub)

    def _granted(self, hub: Hub, sampler_id: str, grant: LeaseGrant) -> None:
        if hub is self.hub:
            self.witness.granted(hub, sampler_id, grant)

    def _objected(self, hub: Hub, request: Submission, what: str) -> None:
        if hub is self.hub:
            self.witness.objected(hub, request, what)

    def _hub_died(self, when: str) -> None:
        self.kill_hub(f"dies {when}", keeps=False)

    def kill_hub(self, what: str, *, keeps: bool = True) -> bool:
        hub = self.hub
        if hub is None:
            return False
        if keeps:
            self.hub_disk.keep()
        self.tell("coordinator", what)
        self.hub = None
        hub.process.kill()
        if not hub.has_stopped:
            self._closers.append(hub.ledger.close)
        self.loop.call_later(self.down_for_s, self._start_hub)
        return True

    def lose_versions(self) -> None:
        """Let the next coordinator begin without any version."""
        self._shelf = Shelf()
        self.witness.versions_lost()

    def back_up(self) -> Path:
        """Copy the coordinator's ledger as it is now."""
        copy = self._directory / "backup.sqlite"
        back_up(self.hub_disk.directory / FILE_NAME, to=copy)
        return copy

    def restore(self, copy: Path) -> None:
        """Put a copy in the place of the ledger and accept the loss; the coordinator and its versions go."""
        self.kill_hub("is lost with its machine; an older ledger is restored")
        ledger, now = self.hub_disk.directory / FILE_NAME, self.clock("coordinator").now()
        restore(copy, ledger=ledger, accepts_loss=True, now=now)
        self.hub_disk.before = self.hub_disk.after = None
        self._has_lost_ledger = True
        self.lose_versions()

    def _start_learner(self) -> None:
        if self.learner is not None:
            return
        process = self.process("learner")
        with process.entered():
            self.learner = SimulatedLearner(
                self.plan,
                process,
                self.learner_disk,
                network=self.network,
                hub=lambda: self.hub,
                group_of=self._group_of,
                draw=self.draw("learner"),
                clock=self.clock("learner"),
                witness=self.witness,
                reached=self.reached,
                dies=self._learner_died,
            )
        self.tell("learner", f"starts with epoch {self.learner_disk.epoch} at version {self.learner.version}")
        self.learner.start()

    def _learner_died(self) -> None:
        self.kill_learner("dies after its journal has the step", for_s=self.learner_down_for_s)

    def kill_learner(self, what: str, *, for_s: float) -> bool:
        learner = self.learner
        if learner is None:
            return False
        self.tell("learner", what)
        self.learner = None
        learner.process.kill()
        self.loop.call_later(for_s, self._start_learner)
        return True

    def start_verifier(self, name: str) -> None:
        process = self.process(name)
        with process.entered():
            verifier = SimulatedVerifier(
                process,
                network=self.network,
                hub=lambda: self.hub,
                draw=self.draw(name),
                witness=self.witness,
            )
        self.tell(name, "starts")
        self.verifiers[name] = verifier
        verifier.start()

    def start_contributor(self, name: str, *, is_twin: bool = False) -> SimulatedContributor | None:
        if name in self.gone or (name in self.contributors and not is_twin):
            return None
        process = self.process(name)
        with process.entered():
            contributor = SimulatedContributor(
                self.plan,
                process,
                network=self.network,
                hub=lambda: self.hub,
                learner=lambda: self.learner,
                draw=self.draw(name),
                clock=self.clock(name),
                witness=self.witness,
                reached=self.reached,
                replaced=self._replaced,
            )
        self.tell(name, "starts a second time" if is_twin else "starts")
        if not is_twin:
            self.contributors[name] = contributor
        contributor.start()
        return contributor

    def _replaced(self, contributor: SimulatedContributor) -> None:
        """Start a contributor again that has ended because another process of its name is there."""
        self.tell(contributor.name, "ends, replaced by another process of its name")
        contributor.process.kill()
        if self.contributors.get(contributor.name) is contributor:
            del self.contributors[contributor.name]
            self.loop.call_later(RESTART_S, self.start_contributor, contributor.name)

    def kill_contributor(self, name: str) -> bool:
        contributor = self.contributors.pop(name, None)
        if contributor is None:
            return False
        self.tell(name, "is killed")
        contributor.process.kill()
        return True

    def start_sampler(self, name: str, *, is_twin: bool = False) -> SimulatedSampler | None:
        if name in self.gone or (name in self.samplers and not is_twin):
            return None
        process = self.process(name)
        with process.entered():
            sampler = SimulatedSampler(
                self.plan,
                process,
                network=self.network,
                hub=lambda: self.hub,
                keep=self.keep,
                draw=self.draw(name),
                clock=self.clock(name),
                witness=self.witness,
                reached=self.reached,
            )
        self.tell(name, "starts" if process.life == 1 else f"starts as process {process.life}")
        if not is_twin:
            self.samplers[name] = sampler
        sampler.start()
        return sampler

    def kill_sampler(self, name: str) -> bool:
        sampler = self.samplers.pop(name, None)
        if sampler is None:
            return False
        self.tell(name, "is killed")
        self.end_sampler(sampler)
        return True

    def end_sampler(self, sampler: SimulatedSampler) -> None:
        """Kill a sampler's process; the coordinator finds its stream ended a moment later."""
        sampler.process.kill()
        self.loop.call_later(DISCONNECTED_S, self._disconnected, sampler)

    def _disconnected(self, sampler: SimulatedSampler) -> None:
        if self.hub is None or self.hub.peers.instance(sampler.peer) != sampler.instance:
            return
        self.hub.peers.disconnected(sampler.peer)

    def keep(self, group: RolloutGroup) -> bytes:
        key = f"{group.group_id}#{len(self._groups)}".encode()
        self._groups[key] = group
        return key

    def _group_of(self, columns: bytes) -> RolloutGroup:
        """Return the group that these columns stand for, with the rewards that a verifier has appended."""
        if (group := self._groups.get(columns)) is not None:
            return group
        group = self._groups[columns.removesuffix(_GRADED)]
        graded = zip(group.completions, GRADES.rewards, strict=True)
        return replace(group, completions=tuple(replace(one, reward=float(r)) for one, r in graded))

    def tell(self, who: str, what: str) -> None:
        self._story.append(Line(self.loop.time(), who, what))

    def _end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(StandsStillError):
            self.loop.run_until_complete(_settled_down())
        for close in self._closers:
            close()
        if self.hub is not None and not self.hub.has_stopped:
            self.hub.ledger.close()
        self.loop.close()


async def _settled_down() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
