"""Fault injection during the run, and the evidence that each fault was noticed and repaired.

after 25 % of the versions --> a sampler is killed and started again
after 60 % of them         --> the coordinator is killed and started again
                               '--> from then on it damages the first frames of weights it serves
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from deploy.demo import damaging_node
from deploy.demo.plan import NEAR, SAMPLERS
from deploy.runs.observation import Observation
from deploy.runs.promises import LAST_BATCHES, Check
from deploy.runs.records import Step
from deploy.runs.run_directory import COORDINATOR
from node.values.run import RunStatus

DAMAGED_FRAMES: Final = 3
NOTICED_FRAMES: Final = 2
"""One may be sent to a sampler that has no use for it: what is pushed and not wanted is never looked at."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A process to kill, and when."""

    name: str
    """The process that is killed and started again."""
    at: float
    """Share of all versions made by then."""
    environ: Mapping[str, str]
    """Environment of its next start."""
    module: str = "node"
    """Module that it is started as."""


SCHEDULE: Final = (
    Strike(NEAR, at=0.25, environ={}),
    Strike(
        COORDINATOR,
        at=0.6,
        environ={damaging_node.VARIABLE: str(DAMAGED_FRAMES)},
        module=damaging_node.__name__,
    ),
)
"""Far enough apart that each fault is repaired before the next, or before the end."""


class Victims(Protocol):
    """Processes that can be killed and started again."""

    async def wait_until_busy(self, name: str) -> None:
        """Wait for a moment at which a sampler holds leases."""
        ...

    async def kill(self, name: str) -> None:
        """Kill it (SIGKILL)."""
        ...

    async def start(self, name: str, *, environ: Mapping[str, str], module: str) -> None:
        """Start it and wait until it serves."""
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """A process that was killed and started again."""

    name: str
    version: int
    """Newest version when it was killed."""
    at_s: float
    """Unix seconds when it was killed."""
    away_s: float
    """How long until it served again."""


class Chaos:
    """Strikes that are due, each once."""

    def __init__(self, victims: Victims, *, versions: int) -> None:
        self._victims = victims
        self._versions = versions
        self._left = list(SCHEDULE)
        self.faults: list[Fault] = []

    def due(self, version: int) -> Strike | None:
        """Remove and return the next strike if it is due."""
        is_due = self._left and version >= self._left[0].at * self._versions
        return self._left.pop(0) if is_due else None

    async def strike(self, strike: Strike, *, version: int) -> None:
        """Kill a process, a sampler while it holds leases, and start it again; return when it serves."""
        if strike.name in SAMPLERS:
            await self._victims.wait_until_busy(strike.name)
        at_s, began_s = time.time(), time.monotonic()
        await self._victims.kill(strike.name)
        await self._victims.start(strike.name, environ=strike.environ, module=strike.module)
        self.faults.append(Fault(strike.name, version, at_s, time.monotonic() - began_s))


def evaluate(faults: Sequence[Fault], seen: Observation) -> tuple[Check, ...]:
    """Check the last observation before the drain for the consequences of each fault; pure."""
    by_name = {fault.name: fault for fault in faults}
    checks = []
    if sampler := by_name.get(NEAR):
        checks.append(_sampler_was_replaced(sampler, seen))
    if coordinator := by_name.get(COORDINATOR):
        checks += [_peers_came_back(coordinator, seen), _frames_were_refetched(coordinator, seen)]
    missing = [strike.name for strike in SCHEDULE if strike.name not in by_name]
    checks.append(Check("every fault took place", not missing, f"left out: {', '.join(missing) or 'none'}"))
    return tuple(checks)


def _sampler_was_replaced(fault: Fault, seen: Observation) -> Check:
    expired = seen.scrapes.total(COORDINATOR, "heterorl_coordinator_lease_expiries_total")
    again = sum(group.attempt > 1 for step in seen.steps for group in step.groups)
    newest = [group for step in seen.steps[-LAST_BATCHES:] for group in step.groups]
    lately = sum(group.sampler_id == fault.name for group in newest)
    return Check(
        f"{fault.name} killed at version {fault.version}",
        expired > 0 and again > 0 and lately > 0,
        f"noticed: {expired:.0f} leases expired. Repaired: {again} groups trained on from prompts "
        f"leased again; serving after {fault.away_s:.1f} s, {lately} of its groups in the last "
        f"{LAST_BATCHES} batches",
    )


def _peers_came_back(fault: Fault, seen: Observation) -> Check:
    joined = _joined(seen.status)
    after = sum(step.at_s > fault.at_s for step in seen.steps)
    return Check(
        f"coordinator killed at version {fault.version}",
        len(joined) > len(SAMPLERS) and after > 0,
        f"noticed: by {', '.join(joined) or 'no peer'}, which joined again by themselves. "
        f"Repaired: serving after {fault.away_s:.1f} s, longest pause between steps "
        f"{_longest_pause_s(fault, seen.steps):.1f} s, {after} versions made since",
    )


def _frames_were_refetched(fault: Fault, seen: Observation) -> Check:
    damaged = {name: seen.scrapes.total(name, "heterorl_node_frames_damaged_total") for name in SAMPLERS}
    held = {name: seen.scrapes.newest(name).total("heterorl_sampler_held_version") for name in SAMPLERS}
    return Check(
        f"{DAMAGED_FRAMES} frames of weights damaged in flight after version {fault.version}",
        sum(damaged.values()) >= NOTICED_FRAMES and all(version > fault.version for version in held.values()),
        "noticed: "
        + ", ".join(f"{n:.0f} by {name}" for name, n in damaged.items())
        + ". Repaired: each fetched again alone; now "
        + ", ".join(f"{name} holds version {version:.0f}" for name, version in held.items()),
    )


def _joined(status: RunStatus | None) -> list[str]:
    return [peer.node_id for peer in status.peers if peer.joins] if status else []


def _longest_pause_s(fault: Fault, steps: Sequence[Step]) -> float:
    """Return the longest time between two steps of which the second came after the fault."""
    pauses = (after.at_s - before.at_s for before, after in pairwise(steps) if after.at_s > fault.at_s)
    return max(pauses, default=0.0)
