"""Waits, once nothing fails any more, until a run goes on as before; one that does not breaks its promise."""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.world import World

RECOVERY_S = 300.0
"""Longest a run may take, once nothing fails any more, until it has taken STEPS and everybody has delivered:
pauses after faults last up to a minute, and stops for an evaluation half of that."""

STEPS = 2


async def recovered(world: "World") -> None:
    """Wait until the run goes on as if nothing had been."""
    world.tell("world", "nothing fails any more")
    began_s, steps = world.loop.time(), len(world.witness.history)
    before = Counter(world.witness.delivered_by)
    old = set() if world.hub is None else world.witness.unfinished(world.hub)
    while not world.has_failed:
        idle = _without_groups_since(world, before)
        left = steps + STEPS - len(world.witness.history)
        waiting = [] if world.hub is None else sorted(old & world.witness.unfinished(world.hub))
        if not idle and left <= 0 and not waiting:
            return
        if world.loop.time() > began_s + RECOVERY_S:
            world.witness.violated(_standstill(world, idle, left, waiting))
        await asyncio.sleep(1.0)


def _without_groups_since(world: "World", before: Counter[str]) -> list[str]:
    return [
        name
        for name in world.plan.sampler_names
        if name not in world.gone and world.witness.delivered_by[name] <= before[name]
    ]


def _standstill(world: "World", idle: list[str], left: int, waiting: list[str]) -> str:
    waits = {name: sampler.waits_for for name, sampler in world.samplers.items()}
    waits |= {name: contributor.waits_for for name, contributor in world.contributors.items()}
    if world.learner is not None:
        waits["learner"] = world.learner.waits_for
    counts = (
        {} if world.hub is None else {s.value: n for s, n in world.hub.accounts.slots.counts().items() if n}
    )
    return (
        f"{RECOVERY_S:g} s after the last fault {left} of {STEPS} steps are not taken, "
        f"{', '.join(idle) or 'nobody'} delivered nothing, unfinished: "
        f"{', '.join(waiting[:5]) or 'none'}; "
        f"who waits for what: {waits}; slots: {counts}"
    )
