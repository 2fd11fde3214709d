"""One run from its plan: peers, network, disks, faults in their time, and what the witness says of it.

grows --faults begin and end--> calm: the run has to recover --> steps and groups of everybody: it has
                                             '--within RECOVERY_S not: violated
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from heterorl.v1 import rollout_pb2
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.work.slots.slot import group_id
from node.errors import RefusedError, StartupError
from node.values.operator_order import EVERYBODY, PARDON, REVOKE, Order
from node.values.rollout import LeaseGrant, RolloutGroup
from simulation.disks import DiedError, SimulatedDisk
from simulation.faults import STRANGERS, Fault, K, Plan
from simulation.hub import Hub, Shelf, draw_for
from simulation.learner import LearnerDisk, SimulatedLearner
from simulation.network import Network
from simulation.sampler import SimulatedSampler
from simulation.strangers import Stranger
from simulation.verifier import GRADES, SimulatedVerifier
from simulation.virtual_loop import Clock, Process, StandsStillError, VirtualLoop
from simulation.witness import Witness

RECOVERY_S = 300.0
"""Longest a run may take, once nothing fails any more, until it has taken STEPS and everybody has delivered:
pauses after faults last up to a minute, and stops for an evaluation half of that."""

STEPS = 2

GROWTH_S = 10.0
"""A run without faults is left alone for so long."""

DISCONNECTED_S = 0.3

VERIFIERS = ("verifier-1", "verifier-2")
"""Where verifiers grade."""

_GRADED = rollout_pb2.GroupColumns(rewards=GRADES.rewards.tobytes()).SerializeToString()
"""The bytes that the coordinator appends to a group's columns."""

RESTART_S = 1.0
"""Until a coordinator is started again that ended before it served."""

LARGEST_JUMP_S = 3600.0

DIED_IN_COMMIT = {
    K.KILLED_BEFORE_COMMIT,
    K.KILLED_WITHIN_COMMIT,
    K.KILLED_AFTER_COMMIT,
    K.POWER_CUT_IN_COMMIT,
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a run's story."""

    at_s: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.who:12} {self.what}"


@dataclass(frozen=True, slots=True)
class Outcome:
    plan: Plan
    violations: tuple[str, ...]
    story: tuple[Line, ...]
    reached: Counter[str]
    steps: int
    virtual_s: float

    @property
    def digest(self) -> str:
        """Return a digest of the story; two runs with the same digest went the same way."""
        text = "\n".join(f"{line.at_s!r} {line.who} {line.what}" for line in self.story)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def simulate(plan: Plan) -> Outcome:
    """Run a plan to its end, or to the first violation."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="simulation-", dir=root))
    try:
        with _quiet(), _without_collector():
            return _World(plan, directory).run()
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


class _World:
    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan = plan
        self._directory = directory
        self._loop = VirtualLoop()
        self._story: list[Line] = []
        self._reached: Counter[str] = Counter()
        self._witness = Witness(plan, self._loop, self._tell, reached=self._reached)
        self._network = Network(self._loop, plan.seed)
        self._lives: Counter[str] = Counter()
        self._clocks: dict[str, Clock] = {}
        self._groups: dict[bytes, RolloutGroup] = {}
        self._shelf = Shelf()
        self._hub_disk = SimulatedDisk(directory / "hub", draw_for(plan.seed, "hub disk"), files=(FILE_NAME,))
        self._learner_disk = LearnerDisk()
        self._hub: Hub | None = None
        self._learner: SimulatedLearner | None = None
        self._samplers: dict[str, SimulatedSampler] = {}
        self._verifiers: dict[str, SimulatedVerifier] = {}
        self._gone: set[str] = set()
        self._down_for_s = 1.0
        self._options = 1
        """Which of the task's options are configured."""
        self._closers: list[Callable[[], None]] = []

    def run(self) -> Outcome:
        asyncio.set_event_loop(None)
        with contextlib.suppress(StandsStillError):
            try:
                self._loop.run_until_complete(self._main())
            except StandsStillError as error:
                self._witness.violated(str(error))
                raise
            finally:
                self._end()
        if self._loop.crash is not None:
            self._witness.violated(f"a task crashed: {self._loop.crash!r}")
        return Outcome(
            self._plan,
            tuple(dict.fromkeys(self._witness.violations)),
            tuple(self._story),
            self._reached,
            len(self._witness.history),
            self._loop.time(),
        )

    async def _main(self) -> None:
        self._start_hub()
        self._start_learner()
        for name in self._plan.sampler_names:
            self._start_sampler(name)
        for name in VERIFIERS if self._plan.verifiers_grade else ():
            self._start_verifier(name)
        faults = [self._loop.create_task(self._inflict(fault)) for fault in self._plan.faults]
        ends_s = max(GROWTH_S, self._plan.last_fault_s)
        while self._loop.time() < ends_s and not self._has_failed:  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(1.0)
        if not self._has_failed and faults:
            await asyncio.wait(faults)
        await self._recover()
        if self._hub is not None and not self._has_failed:
            self._witness.at_end(self._hub)

    async def _recover(self) -> None:
        """Wait until the run goes on as if nothing had been."""
        self._tell("world", "nothing fails any more")
        began_s, steps = self._loop.time(), len(self._witness.history)
        before = Counter(self._witness.delivered_by)
        old = set() if self._hub is None else self._witness.unfinished(self._hub)
        while not self._has_failed:
            idle = self._without_groups_since(before)
            left = steps + STEPS - len(self._witness.history)
            waiting = [] if self._hub is None else sorted(old & self._witness.unfinished(self._hub))
            if not idle and left <= 0 and not waiting:
                return
            if self._loop.time() > began_s + RECOVERY_S:
                self._witness.violated(self._standstill(idle, left, waiting))
            await asyncio.sleep(1.0)

    @property
    def _has_failed(self) -> bool:
        return bool(self._witness.violations) or self._loop.crash is not None

    def _without_groups_since(self, before: Counter[str]) -> list[str]:
        return [
            name
            for name in self._plan.sampler_names
            if name not in self._gone and self._witness.delivered_by[name] <= before[name]
        ]

    def _standstill(self, idle: list[str], left: int, waiting: list[str]) -> str:
        waits = {name: sampler.waits_for for name, sampler in self._samplers.items()}
        if self._learner is not None:
            waits["learner"] = self._learner.waits_for
        counts = (
            {}
            if self._hub is None
            else {s.value: n for s, n in self._hub.accounts.slots.counts().items() if n}
        )
        return (
            f"{RECOVERY_S:g} s after the last fault {left} of {STEPS} steps are not taken, "
            f"{', '.join(idle) or 'nobody'} delivered nothing, unfinished: "
            f"{', '.join(waiting[:5]) or 'none'}; "
            f"who waits for what: {waits}; slots: {counts}"
        )

    # Peers and their lives.

    def _process(self, name: str) -> Process:
        self._lives[name] += 1
        return Process(self._loop, name, self._lives[name])

    def _clock(self, name: str) -> Clock:
        return self._clocks.setdefault(name, Clock(self._loop))

    def _draw(self, name: str) -> Any:
        return draw_for(self._plan.seed, f"{name}/{self._lives[name]}")

    def _start_hub(self) -> None:
        if self._hub is not None:
            return
        process, disk = self._process("coordinator"), self._hub_disk
        try:
            with process.entered():
                hub = Hub(
                    self._plan,
                    process,
                    disk,
                    clock=self._clock("coordinator"),
                    shelf=self._shelf,
                    task_digest=self._options.to_bytes(16),
                    reached=self._reached,
                    settled=self._settled,
                    granted=self._granted,
                )
        except StartupError as error:
            self._witness.violated(f"the coordinator does not start again: {error}")
            return
        except (DiedError, RefusedError) as error:
            self._tell("coordinator", f"ends as it starts: {error or 'it dies in its first commit'}")
            self._loop.call_later(RESTART_S, self._start_hub)
            return
        if disk.before is not None and hub.balance_at_start not in (disk.before, disk.after):
            self._witness.violated("a commit that a death cut short is on disk in part")
        disk.before = disk.after = None
        disk.on_death = self._hub_died
        self._hub = hub
        self._tell("coordinator", "starts" if process.life == 1 else "starts again")
        self._witness.started(hub)
        process.spawn(hub.keep_up())

    def _settled(self, hub: Hub, failure: Exception | None) -> None:
        if hub is not self._hub:
            return
        if failure is None:
            self._witness.settled(hub)
        elif not hub.run_ledger._is_ahead:
            self._tell("coordinator", "cannot write its ledger")
            self._witness.went_back(hub)

    def _granted(self, hub: Hub, sampler_id: str, grant: LeaseGrant) -> None:
        if hub is self._hub:
            self._witness.granted(hub, sampler_id, grant)

    def _hub_died(self, when: str) -> None:
        self._kill_hub(f"dies {when}", keeps=False)

    def _kill_hub(self, what: str, *, keeps: bool = True) -> bool:
        hub = self._hub
        if hub is None:
            return False
        if keeps:
            self._hub_disk.keep()
        self._tell("coordinator", what)
        self._hub = None
        hub.process.kill()
        if not hub.has_stopped:
            self._closers.append(hub.ledger.close)
        self._loop.call_later(self._down_for_s, self._start_hub)
        return True

    def _start_learner(self) -> None:
        if self._learner is not None:
            return
        process = self._process("learner")
        with process.entered():
            self._learner = SimulatedLearner(
                self._plan,
                process,
                self._learner_disk,
                network=self._network,
                hub=lambda: self._hub,
                group_of=self._group_of,
                draw=self._draw("learner"),
                clock=self._clock("learner"),
                witness=self._witness,
                reached=self._reached,
                dies=self._learner_died,
            )
        self._tell(
            "learner", f"starts with epoch {self._learner_disk.epoch} at version {self._learner.version}"
        )
        self._learner.start()

    def _learner_died(self) -> None:
        self._kill_learner("dies after its journal has the step", for_s=self._learner_down_for_s)

    _learner_down_for_s = 1.0

    def _kill_learner(self, what: str, *, for_s: float) -> bool:
        learner = self._learner
        if learner is None:
            return False
        self._tell("learner", what)
        self._learner = None
        learner.process.kill()
        self._loop.call_later(for_s, self._start_learner)
        return True

    def _start_verifier(self, name: str) -> None:
        process = self._process(name)
        with process.entered():
            verifier = SimulatedVerifier(
                process,
                network=self._network,
                hub=lambda: self._hub,
                draw=self._draw(name),
                witness=self._witness,
            )
        self._tell(name, "starts")
        self._verifiers[name] = verifier
        verifier.start()

    def _of_verifiers(self, fault: Fault) -> Callable[[], None] | None:
        names = VERIFIERS if fault.kind is K.VERIFIERS_AWAY else VERIFIERS[:1]
        killed = [(name, one) for name in names if (one := self._verifiers.pop(name, None)) is not None]
        for name, one in killed:
            self._tell(name, "is killed")
            one.process.kill()

        def undo() -> None:
            for name, _ in killed:
                self._start_verifier(name)

        return undo

    def _start_sampler(self, name: str, *, is_twin: bool = False) -> SimulatedSampler | None:
        if name in self._gone or (name in self._samplers and not is_twin):
            return None
        process = self._process(name)
        with process.entered():
            sampler = SimulatedSampler(
                self._plan,
                process,
                network=self._network,
                hub=lambda: self._hub,
                keep=self._keep,
                draw=self._draw(name),
                clock=self._clock(name),
                witness=self._witness,
                reached=self._reached,
            )
        self._tell(name, "starts" if process.life == 1 else f"starts as process {process.life}")
        if not is_twin:
            self._samplers[name] = sampler
        sampler.start()
        return sampler

    def _kill_sampler(self, name: str) -> bool:
        sampler = self._samplers.pop(name, None)
        if sampler is None:
            return False
        self._tell(name, "is killed")
        self._end_sampler(sampler)
        return True

    def _end_sampler(self, sampler: SimulatedSampler) -> None:
        """Kill a sampler's process; the coordinator finds its stream ended a moment later."""
        sampler.process.kill()
        self._loop.call_later(DISCONNECTED_S, self._disconnected, sampler)

    def _disconnected(self, sampler: SimulatedSampler) -> None:
        if self._hub is None or self._hub.peers.instance(sampler.peer) != sampler.instance:
            return
        self._hub.peers.disconnected(sampler.peer)

    def _keep(self, group: RolloutGroup) -> bytes:
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

    # Faults.

    async def _inflict(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s - self._loop.time())
        if self._has_failed:
            return
        undo = self._begin(fault)
        if undo is None:
            return
        self._reached[f"fault: {fault.kind}"] += 1
        self._tell("fault", f"{fault.kind}{f' ({fault.target})' if fault.target else ''}")
        await asyncio.sleep(fault.for_s)
        undo()

    def _begin(self, fault: Fault) -> Callable[[], None] | None:
        """Make a fault happen; return what ends it, None: it could not happen."""
        kind = fault.kind
        if kind in STRANGERS:
            return self._stranger(fault)
        if kind in (K.CUT, K.LOSSY, K.REPEATED, K.FAR):
            return self._of_network(fault)
        if kind.name.startswith(("SAMPLER", "REVOKED", "QUARANTINED")):
            return self._of_sampler(fault)
        if kind.name.startswith("LEARNER"):
            return self._of_learner(fault)
        if kind.name.startswith("VERIFIER"):
            return self._of_verifiers(fault)
        return self._of_hub(fault)

    def _stranger(self, fault: Fault) -> Callable[[], None]:
        process = self._process(f"stranger-{fault.kind.name.lower().replace('_', '-')}")
        stranger = Stranger(
            fault.kind,
            self._plan,
            process,
            network=self._network,
            hub=lambda: self._hub,
            keep=self._keep,
            draw=self._draw(process.name),
            witness=self._witness,
        )
        stranger.start()
        return process.kill

    def _of_network(self, fault: Fault) -> Callable[[], None]:
        condition = self._network.condition(fault.target)
        match fault.kind:
            case K.CUT:
                condition.cuts += 1
            case K.LOSSY:
                condition.loss = 0.05 + 0.3 * fault.amount
            case K.REPEATED:
                condition.repeats = 0.3 + 0.7 * fault.amount
            case _:
                condition.delay_factor = 2.0 + 40.0 * fault.amount

        def undo() -> None:
            match fault.kind:
                case K.CUT:
                    condition.cuts -= 1
                case K.LOSSY:
                    condition.loss = 0.0
                case K.REPEATED:
                    condition.repeats = 0.0
                case _:
                    condition.delay_factor = 1.0

        return undo

    def _of_sampler(self, fault: Fault) -> Callable[[], None] | None:
        name = fault.target
        sampler = self._samplers.get(name)
        match fault.kind:
            case K.SAMPLER_KILLED:
                return (lambda: self._start_again(name)) if self._kill_sampler(name) else None
            case K.SAMPLER_GONE:
                self._gone.add(name)
                return _nothing if self._kill_sampler(name) else None
            case K.SAMPLER_TWIN:
                twin = self._start_sampler(name, is_twin=True)
                return None if twin is None else partial(self._end_sampler, twin)
            case K.SAMPLER_CLOCK:
                self._clock(name).offset_s += (2 * fault.amount - 1) * LARGEST_JUMP_S
                return _nothing
            case K.REVOKED:
                self._gone.add(name)
                self._order(Order(REVOKE, name, order_id=f"{fault.at_s}"))
                return _nothing
            case K.QUARANTINED if self._learner is not None:
                self._learner.quarantine(name, "its logprobs are off")
                return lambda: self._release(name)
            case K.SAMPLER_SLOW if sampler is not None:
                sampler.slowness = 2.0 + 20.0 * fault.amount
                return lambda: setattr(sampler, "slowness", 1.0)
            case K.SAMPLER_FAILS if sampler is not None:
                sampler.fails_prompts = True
                return lambda: setattr(sampler, "fails_prompts", False)
        return None

    def _order(self, order: Order) -> None:
        """Send an operator's order, again and again until a coordinator has taken it."""
        if (hub := self._hub) is not None:
            known = hub.accounts.orders.newest(order.verb, order.about)
            if known is not None and known.order_id == order.order_id:
                return
            hub.process.spawn(self._give(hub, order))
        self._loop.call_later(2.0, self._order, order)

    async def _give(self, hub: Hub, order: Order) -> None:
        with contextlib.suppress(RefusedError):
            await hub.desk.give((order,), again=False, wait_s=0.0)

    def _start_again(self, name: str) -> None:
        self._start_sampler(name)

    def _release(self, name: str) -> None:
        """Release a sampler from quarantine, as the learner does once its groups fit, or its next life."""
        if self._learner is not None:
            self._learner.quarantine(name, "")
        else:
            self._loop.call_later(1.0, self._release, name)

    def _of_learner(self, fault: Fault) -> Callable[[], None] | None:
        learner, disk = self._learner, self._learner_disk
        match fault.kind:
            case K.LEARNER_KILLED:
                return _nothing if self._kill_learner("is killed", for_s=fault.for_s) else None
            case K.LEARNER_KILLED_IN_STEP:
                disk.dies_in_step, self._learner_down_for_s = True, min(fault.for_s, 10.0)
                return lambda: setattr(disk, "dies_in_step", False)
            case K.LEARNER_DISK_FULL:
                disk.is_full = True
                return lambda: setattr(disk, "is_full", False)
            case _ if learner is not None:
                learner.is_stalled = True
                return lambda: setattr(learner, "is_stalled", False)
        return None

    def _of_hub(self, fault: Fault) -> Callable[[], None] | None:
        hub, disk = self._hub, self._hub_disk
        self._down_for_s = fault.for_s
        if fault.kind in DIED_IN_COMMIT:
            disk.death = fault.kind
            return lambda: setattr(disk, "death", None)
        match fault.kind:
            case K.COORDINATOR_KILLED:
                return _nothing if self._kill_hub("is killed") else None
            case K.COORDINATOR_STOPPED if hub is not None:
                hub.process.spawn(self._stop(hub))
                return _nothing
            case K.DISK_FULL:
                disk.is_full = True
                return lambda: setattr(disk, "is_full", False)
            case K.DISK_FAILS_NOW_AND_THEN:
                disk.fails_now_and_then = True
                return lambda: setattr(disk, "fails_now_and_then", False)
            case K.DISK_SLOW:
                disk.slowness_s = 0.1 + 12.0 * fault.amount**2
                return lambda: setattr(disk, "slowness_s", 0.0)
            case K.COORDINATOR_CLOCK:
                self._clock("coordinator").offset_s += (2 * fault.amount - 1) * LARGEST_JUMP_S
                return _nothing
            case K.PARDONED if hub is not None:
                self._order(Order(PARDON, EVERYBODY, order_id=f"{fault.at_s}"))
                return _nothing
            case K.TASK_CHANGED if hub is not None:
                self._options += 1
                for slot in hub.accounts.slots.open.untrained_slots():
                    self._witness.excuse(group_id(slot.number, slot.winner), "graded by other options")
                return _nothing if self._kill_hub("is stopped, and given other options") else None
            case K.GROUP_DAMAGED if hub is not None:
                return _nothing if self._damage(hub) and self._kill_hub("is killed") else None
        return None

    async def _stop(self, hub: Hub) -> None:
        await hub.door.close()
        hub.has_stopped = True
        if hub is self._hub:
            self._kill_hub("has stopped in good order")

    def _damage(self, hub: Hub) -> bool:
        """Change the oldest group on disk."""
        row = hub.ledger._connection.execute(
            "SELECT slot, attempt FROM groups ORDER BY slot LIMIT 1"
        ).fetchone()
        if row is None or hub.ledger._connection.in_transaction:
            return False
        hub.ledger._connection.execute(
            "UPDATE groups SET columns = CAST(x'00' || substr(columns, 2) AS BLOB) WHERE slot = ?", row[:1]
        )
        self._witness.excuse(group_id(*row), "damaged on disk")
        return True

    def _tell(self, who: str, what: str) -> None:
        self._story.append(Line(self._loop.time(), who, what))

    def _end(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(StandsStillError):
            self._loop.run_until_complete(_settled_down())
        for close in self._closers:
            close()
        if self._hub is not None and not self._hub.has_stopped:
            self._hub.ledger.close()
        self._loop.close()


async def _settled_down() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _nothing() -> None:
    """End a fault that ends by itself, or not at all."""
