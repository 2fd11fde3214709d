"""Inflicts a plan's faults on a world: what each kind does to peers, disks, clocks and the network.

Every fault begins at its time and returns what ends it, unless it ends by itself.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from node.coordinator.work.slots.slot import group_id
from node.errors import RefusedError, StartupError
from node.values.operator_order import EVERYBODY, PARDON, REVOKE, Order
from simulation.faults import STRANGERS, Fault, K
from simulation.hub import Hub
from simulation.strangers import Stranger

if TYPE_CHECKING:
    from simulation.world import World

VERIFIERS = ("verifier-1", "verifier-2")
"""Where verifiers grade."""

LARGEST_JUMP_S = 3600.0

TAKEOVER_LOOKS, TAKEOVER_LOOK_S = 100, 0.1
"""For the worst moment."""

DIED_IN_COMMIT = {
    K.KILLED_BEFORE_COMMIT,
    K.KILLED_WITHIN_COMMIT,
    K.KILLED_AFTER_COMMIT,
    K.POWER_CUT_IN_COMMIT,
}


Undo: TypeAlias = Callable[[], object]


class Inflictor:
    """Inflicts faults on one world."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def inflict(self, fault: Fault) -> None:
        """Begin a fault at its time, where it can happen, and end it at its own."""
        await asyncio.sleep(fault.at_s - self._world.loop.time())
        if self._world.has_failed:
            return
        undo = self._begin(fault)
        if undo is None:
            return
        self._world.reached[f"fault: {fault.kind}"] += 1
        self._world.tell("fault", f"{fault.kind}{f' ({fault.target})' if fault.target else ''}")
        await asyncio.sleep(fault.for_s)
        undo()

    def _begin(self, fault: Fault) -> Undo | None:
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
        if kind.name.startswith("CONTRIBUTOR"):
            return self._of_contributor(fault)
        if kind.name.startswith("VERIFIER"):
            return self._of_verifiers(fault)
        return self._of_hub(fault)

    def _stranger(self, fault: Fault) -> Undo:
        process = self._world.process(f"stranger-{fault.kind.name.lower().replace('_', '-')}")
        stranger = Stranger(
            fault.kind,
            self._world.plan,
            process,
            network=self._world.network,
            hub=lambda: self._world.hub,
            keep=self._world.keep,
            draw=self._world.draw(process.name),
            witness=self._world.witness,
        )
        stranger.start()
        return process.kill

    def _of_network(self, fault: Fault) -> Undo:
        condition = self._world.network.condition(fault.target)
        match fault.kind:
            case K.CUT:
                condition.cuts += 1
                return lambda: setattr(condition, "cuts", condition.cuts - 1)
            case K.LOSSY:
                return _meanwhile(condition, "loss", 0.05 + 0.3 * fault.amount, then=0.0)
            case K.REPEATED:
                return _meanwhile(condition, "repeats", 0.3 + 0.7 * fault.amount, then=0.0)
        return _meanwhile(condition, "delay_factor", 2.0 + 40.0 * fault.amount, then=1.0)

    def _of_sampler(self, fault: Fault) -> Undo | None:
        name = fault.target
        sampler = self._world.samplers.get(name)
        match fault.kind:
            case K.SAMPLER_KILLED:
                return partial(self._world.start_sampler, name) if self._world.kill_sampler(name) else None
            case K.SAMPLER_GONE:
                self._world.gone.add(name)
                return _nothing if self._world.kill_sampler(name) else None
            case K.SAMPLER_TWIN:
                twin = self._world.start_sampler(name, is_twin=True)
                return None if twin is None else partial(self._world.end_sampler, twin)
            case K.SAMPLER_CLOCK:
                self._world.clock(name).offset_s += (2 * fault.amount - 1) * LARGEST_JUMP_S
                return _nothing
            case K.REVOKED:
                self._world.gone.add(name)
                self._order(Order(REVOKE, name, order_id=f"{fault.at_s}"))
                return _nothing
            case K.QUARANTINED if self._world.learner is not None:
                self._world.learner.quarantine(name, "its logprobs are off")
                return lambda: self._release(name)
            case K.SAMPLER_SLOW if sampler is not None:
                return _meanwhile(sampler, "slowness", 2.0 + 20.0 * fault.amount, then=1.0)
            case K.SAMPLER_FAILS if sampler is not None:
                return _meanwhile(sampler, "fails_prompts", True, then=False)
        return None

    def _order(self, order: Order) -> None:
        """Send an operator's order, again and again until a coordinator has taken it."""
        if (hub := self._world.hub) is not None:
            known = hub.accounts.orders.newest(order.verb, order.about)
            if known is not None and known.order_id == order.order_id:
                return
            hub.process.spawn(self._give(hub, order))
        self._world.loop.call_later(2.0, self._order, order)

    async def _give(self, hub: Hub, order: Order) -> None:
        with contextlib.suppress(RefusedError):
            await hub.desk.give((order,), again=False, wait_s=0.0)

    def _release(self, name: str) -> None:
        """Release a sampler from quarantine, as the learner does once its groups fit, or its next life."""
        hub, learner = self._world.hub, self._world.learner
        if learner is not None:
            learner.quarantine(name, "")
        listed = () if hub is None else hub.accounts.standings.quarantined()
        if learner is None or hub is None or any(one.sampler_id == name for one in listed):
            self._world.loop.call_later(1.0, self._release, name)

    def _of_learner(self, fault: Fault) -> Undo | None:
        learner, disk = self._world.learner, self._world.learner_disk
        match fault.kind:
            case K.LEARNER_KILLED:
                return _nothing if self._world.kill_learner("is killed", for_s=fault.for_s) else None
            case K.LEARNER_KILLED_IN_STEP:
                self._world.learner_down_for_s = min(fault.for_s, 10.0)
                return _meanwhile(disk, "dies_in_step", True, then=False)
            case K.LEARNER_DISK_FULL:
                return _meanwhile(disk, "is_full", True, then=False)
            case _ if learner is not None:
                return _meanwhile(learner, "is_stalled", True, then=False)
        return None

    def _of_contributor(self, fault: Fault) -> Undo | None:
        world, name = self._world, fault.target
        contributor = world.contributors.get(name)
        match fault.kind:
            case K.CONTRIBUTOR_KILLED:
                return partial(world.start_contributor, name) if world.kill_contributor(name) else None
            case K.CONTRIBUTOR_GONE:
                world.gone.add(name)
                return _nothing if world.kill_contributor(name) else None
            case K.CONTRIBUTOR_REVOKED:
                self._world.gone.add(name)
                self._world.learner_disk.revoked.add(name)
                return _nothing
            case K.CONTRIBUTOR_JOINS:
                return None if world.start_contributor(name) is None else _nothing
            case K.CONTRIBUTOR_STOPPED if contributor is not None:
                contributor.stop()
                return partial(self._start_stopped, name)
            case K.CONTRIBUTOR_TWIN if contributor is not None:
                twin = world.start_contributor(name, is_twin=True)
                return None if twin is None else twin.process.kill
            case K.CONTRIBUTOR_SLOW if contributor is not None:
                return _meanwhile(contributor, "slowness", 2.0 + 20.0 * fault.amount, then=1.0)
            case K.CONTRIBUTOR_LIES if contributor is not None:
                return _meanwhile(contributor, "lies", True, then=False)
        return None

    def _start_stopped(self, name: str) -> None:
        self._world.kill_contributor(name)
        self._world.start_contributor(name)

    def _of_hub(self, fault: Fault) -> Undo | None:
        hub, disk = self._world.hub, self._world.hub_disk
        self._world.down_for_s = fault.for_s
        if fault.kind in DIED_IN_COMMIT:
            return _meanwhile(disk, "death", fault.kind, then=None)
        match fault.kind:
            case K.COORDINATOR_KILLED:
                return _nothing if self._world.kill_hub("is killed") else None
            case K.TAKEN_OVER if hub is not None:
                hub.process.spawn(self._take_over(hub))
                return _nothing
            case K.RESTORED if hub is not None:
                with contextlib.suppress(StartupError):  # a group in it is damaged: there is no whole copy
                    return partial(self._world.restore, self._world.back_up())
            case K.COORDINATOR_STOPPED if hub is not None:
                hub.process.spawn(self._stop(hub))
                return _nothing
            case K.DISK_FULL:
                return _meanwhile(disk, "is_full", True, then=False)
            case K.DISK_FAILS_NOW_AND_THEN:
                return _meanwhile(disk, "fails_now_and_then", True, then=False)
            case K.DISK_SLOW:
                return _meanwhile(disk, "slowness_s", 0.1 + 12.0 * fault.amount**2, then=0.0)
            case K.COORDINATOR_CLOCK:
                self._world.clock("coordinator").offset_s += (2 * fault.amount - 1) * LARGEST_JUMP_S
                return _nothing
            case K.PARDONED if hub is not None:
                self._order(Order(PARDON, EVERYBODY, order_id=f"{fault.at_s}"))
                return _nothing
            case K.TASK_CHANGED if hub is not None:
                self._world.options += 1
                for slot in hub.accounts.slots.open.untrained_slots():
                    self._world.witness.excuse(group_id(slot.number, slot.winner), "graded by other options")
                return _nothing if self._world.kill_hub("is stopped, and given other options") else None
            case K.GROUP_DAMAGED if hub is not None:
                return _nothing if self._damage(hub) and self._world.kill_hub("is killed") else None
        return None

    async def _take_over(self, hub: Hub) -> None:
        """Let another coordinator take over; if possible, while a sampler holds a version not logged yet."""
        for _ in range(TAKEOVER_LOOKS):
            held = {sampler.policy.held.number for sampler in self._world.samplers.values()}
            if any(version and version not in hub.accounts.versions for version in held):
                break
            await asyncio.sleep(TAKEOVER_LOOK_S)
        if hub is self._world.hub:
            self._world.lose_versions()
            self._world.kill_hub("is lost with its machine; another takes over")

    async def _stop(self, hub: Hub) -> None:
        await hub.door.close()
        hub.has_stopped = True
        if hub is self._world.hub:
            self._world.kill_hub("has stopped in good order")

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
        self._world.witness.excuse(group_id(*row), "damaged on disk")
        return True

    def _of_verifiers(self, fault: Fault) -> Undo | None:
        names = VERIFIERS if fault.kind is K.VERIFIERS_AWAY else VERIFIERS[:1]
        killed = [(name, one) for name in names if (one := self._world.verifiers.pop(name, None)) is not None]
        for name, one in killed:
            self._world.tell(name, "is killed")
            one.process.kill()

        def undo() -> None:
            for name, _ in killed:
                self._world.start_verifier(name)

        return undo


def _meanwhile(owner: object, name: str, value: object, *, then: object) -> Undo:
    """Set an attribute; return what sets it to ``then``."""
    setattr(owner, name, value)
    return partial(setattr, owner, name, then)


def _nothing() -> None:
    """End a fault that ends by itself, or not at all."""
