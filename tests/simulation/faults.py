"""The faults of a run: a list drawn from its seed, which can be cut shorter and told in words.

A fault happens at its time whatever other faults there are, and every peer draws from a source of its own. So
a run with fewer faults is, apart from those, nearly the same run, and shrinking works.
"""

import enum
import random
from dataclasses import dataclass, replace
from typing import Any

GRADED_PART = 0.3
"""Part of the runs in which verifiers grade."""

FAULTY_S = 25.0
"""Faults begin within so long; then they end, and the run has to recover."""


class FaultKind(enum.StrEnum):
    """Closed; the report says which were reached."""

    COORDINATOR_KILLED = "the coordinator is killed"
    COORDINATOR_STOPPED = "the coordinator is stopped in good order"
    KILLED_BEFORE_COMMIT = "the coordinator dies before a commit"
    KILLED_WITHIN_COMMIT = "the coordinator dies between two rows of a commit"
    KILLED_AFTER_COMMIT = "the coordinator dies after a commit, before it answers"
    POWER_CUT_IN_COMMIT = "the power fails in a commit, and the end of the log is torn"
    DISK_FULL = "the coordinator's disk is full"
    DISK_FAILS_NOW_AND_THEN = "every other write of the coordinator's disk fails"
    DISK_SLOW = "the coordinator's disk is slow"
    GROUP_DAMAGED = "a group on disk changes while the coordinator is down"
    TASK_CHANGED = "the task's options change, and the coordinator starts again"
    COORDINATOR_CLOCK = "the coordinator's clock jumps"
    LEARNER_KILLED = "the learner is killed"
    LEARNER_KILLED_IN_STEP = "the learner dies after its journal has a step, before it tells"
    LEARNER_DISK_FULL = "the learner's disk is full"
    LEARNER_STALLED = "the learner takes no step"
    SAMPLER_KILLED = "a sampler is killed"
    SAMPLER_GONE = "a sampler is killed and never comes back"
    SAMPLER_TWIN = "a second process of a sampler's name starts"
    SAMPLER_CLOCK = "a sampler's clock jumps"
    SAMPLER_SLOW = "a sampler takes long for a group"
    SAMPLER_FAILS = "a sampler fails every prompt"
    CUT = "a peer cannot reach the others"
    LOSSY = "a peer's connections break"
    REPEATED = "a peer's requests arrive twice"
    FAR = "a peer's messages take long"
    REVOKED = "a sampler is revoked"
    QUARANTINED = "the learner quarantines a sampler"
    PARDONED = "an operator pardons everybody"
    HOARDS = "a stranger leases all it gets and keeps it by heartbeats"
    DROPS = "a stranger leases all it gets and never answers"
    FAILS_ALL = "a stranger fails every prompt"
    STEALS = "a stranger submits for leases that are others'"
    REPLAYS = "a stranger submits each of its groups again and again"
    LIES = "a stranger submits groups with wrong headers"
    FLOODS = "a stranger sends hundreds of requests at once"
    TAKEN_OVER = "another coordinator takes over, and has none of the versions"
    RESTORED = "the coordinator's machine is lost: an older ledger goes on, and the loss is accepted"
    VERIFIER_KILLED = "a verifier is killed"
    VERIFIERS_AWAY = "both verifiers are away"
    CONTRIBUTOR_KILLED = "a contributor is killed"
    CONTRIBUTOR_GONE = "a contributor is killed and never comes back"
    CONTRIBUTOR_STOPPED = "a contributor is stopped in good order"
    CONTRIBUTOR_JOINS = "one more contributor joins"
    CONTRIBUTOR_TWIN = "a second process of a contributor's name starts"
    CONTRIBUTOR_SLOW = "a contributor takes long for a step"
    CONTRIBUTOR_LIES = "a contributor lies about its groups, its steps and its change"
    CONTRIBUTOR_REVOKED = "a contributor is revoked"


K = FaultKind

STRANGERS = frozenset({K.HOARDS, K.DROPS, K.FAILS_ALL, K.STEALS, K.REPLAYS, K.LIES, K.FLOODS})

_OF_SAMPLER = frozenset(
    {
        K.SAMPLER_KILLED,
        K.SAMPLER_GONE,
        K.SAMPLER_TWIN,
        K.SAMPLER_CLOCK,
        K.SAMPLER_SLOW,
        K.SAMPLER_FAILS,
        K.REVOKED,
        K.QUARANTINED,
    }
)
_OF_STORES = (K.TAKEN_OVER, K.RESTORED)
LOSING_PART = 0.3
"""Part of the runs in which what was announced is lost with a coordinator: drawn by itself."""

_OF_VERIFIERS = (K.VERIFIER_KILLED, K.VERIFIERS_AWAY)
"""Drawn by themselves, where verifiers grade."""

_OF_CONTRIBUTORS = (
    K.CONTRIBUTOR_KILLED,
    K.CONTRIBUTOR_GONE,
    K.CONTRIBUTOR_STOPPED,
    K.CONTRIBUTOR_JOINS,
    K.CONTRIBUTOR_TWIN,
    K.CONTRIBUTOR_SLOW,
    K.CONTRIBUTOR_LIES,
)
"""Drawn by themselves, where there are contributors, and so is what fails of their network."""
REVOKING_PART = 0.15
"""Part of the runs with several contributors in which one is revoked: drawn by itself."""
MERGING_PART = 0.4
"""Part of the runs in which contributors train, and the learner merges."""

_OF_PEER = frozenset({K.CUT, K.LOSSY, K.REPEATED, K.FAR})

_LASTING_S = {
    K.COORDINATOR_KILLED: (0.5, 6.0),
    K.COORDINATOR_STOPPED: (0.5, 6.0),
    K.TAKEN_OVER: (0.2, 8.0),
    K.TASK_CHANGED: (0.5, 5.0),
    K.GROUP_DAMAGED: (0.5, 5.0),
    K.KILLED_BEFORE_COMMIT: (0.5, 5.0),
    K.KILLED_WITHIN_COMMIT: (0.5, 5.0),
    K.KILLED_AFTER_COMMIT: (0.5, 5.0),
    K.POWER_CUT_IN_COMMIT: (1.0, 8.0),
    K.LEARNER_KILLED: (1.0, 8.0),
    K.LEARNER_KILLED_IN_STEP: (1.0, 8.0),
    K.SAMPLER_KILLED: (1.0, 10.0),
    K.CONTRIBUTOR_KILLED: (0.5, 20.0),
    K.CONTRIBUTOR_STOPPED: (0.5, 10.0),
}
"""How long until it is started again; other faults last 1 to 8 s."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    at_s: float
    """Since the run began."""
    for_s: float
    target: str = ""
    """Peer; empty: there is only one it can be."""
    amount: float = 0.0
    """In [0, 1): how much, or which of several."""

    @property
    def until_s(self) -> float:
        return self.at_s + self.for_s

    def __str__(self) -> str:
        whom = f" ({self.target})" if self.target else ""
        return f"{self.at_s:6.1f} s  {self.kind}{whom}, for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: everything follows from it."""

    seed: int
    samplers: int
    batch_groups: int
    max_staleness_versions: int
    concurrency_groups: int
    buffer_groups: int
    prompts: int
    lease_ttl_s: float
    lease_max_s: float
    group_s: float
    """Mean time a sampler takes for a group."""
    step_s: float
    uninformative: float
    """Share of batches that teach nothing."""
    evaluates_every_versions: int
    faults: tuple[Fault, ...]
    verifiers_grade: bool = False
    contributors: int = 0
    """0: the learner takes its steps itself."""
    merge: tuple[tuple[str, Any], ...] = ()
    """Keys of [learner.merge] and their values."""

    @property
    def contributor_names(self) -> tuple[str, ...]:
        return tuple(f"contributor-{n}" for n in range(1, self.contributors + 1))

    @property
    def sampler_names(self) -> tuple[str, ...]:
        return tuple(f"sampler-{n}" for n in range(1, self.samplers + 1))

    @property
    def last_fault_s(self) -> float:
        return max((fault.until_s for fault in self.faults), default=0.0)

    def with_faults(self, faults: tuple[Fault, ...]) -> "Plan":
        return replace(self, faults=faults)


def draw_plan(seed: int) -> Plan:
    """Draw a run's size and its faults."""
    draw = random.Random(f"plan/{seed}")
    batch_groups = draw.choice((1, 2, 2, 3))
    staleness = draw.choice((1, 2, 4))
    samplers = draw.choice((2, 2, 3))
    lease_ttl_s = draw.choice((5.0, 10.0))
    plan = Plan(
        seed=seed,
        samplers=samplers,
        batch_groups=batch_groups,
        max_staleness_versions=staleness,
        concurrency_groups=draw.choice((4, 8, 16)),
        buffer_groups=batch_groups + draw.choice((0, 2, 8)),
        prompts=draw.choice((7, 20, 50)),
        lease_ttl_s=lease_ttl_s,
        lease_max_s=lease_ttl_s * draw.choice((2, 4)),
        group_s=draw.choice((2.0, 4.0, 6.0)),
        step_s=draw.choice((1.0, 2.0, 4.0)),
        uninformative=draw.choice((0.0, 0.0, 0.2)),
        evaluates_every_versions=draw.choice((0, 0, 4)),
        faults=(),
    )
    apart = {*_OF_VERIFIERS, *_OF_STORES, *_OF_CONTRIBUTORS, K.CONTRIBUTOR_REVOKED}
    kinds = tuple(kind for kind in FaultKind if kind not in apart)
    faults = [_drawn(draw.choice(kinds), plan, draw) for _ in range(draw.choice((1, 2, 3, 5)))]
    of_verifiers = random.Random(f"verifiers/{seed}")
    if of_verifiers.random() < GRADED_PART:
        plan = replace(plan, verifiers_grade=True, evaluates_every_versions=0)
        faults += [_drawn(kind, plan, of_verifiers) for kind in _OF_VERIFIERS if of_verifiers.random() < 0.5]
    of_stores = random.Random(f"stores/{seed}")
    if of_stores.random() < LOSING_PART:
        faults.append(_drawn(of_stores.choice(_OF_STORES), plan, of_stores))
    of_merging = random.Random(f"merging/{seed}")
    if of_merging.random() < MERGING_PART:
        plan = _with_contributors(plan, of_merging)
        kinds = (*_OF_CONTRIBUTORS, *sorted(_OF_PEER))
        drawn = (of_merging.choice(kinds) for _ in range(of_merging.choice((0, 1, 2, 4))))
        faults += [_of_contributor(kind, plan, of_merging) for kind in drawn]
    of_revoking = random.Random(f"revoking/{seed}")
    if plan.contributors > 1 and of_revoking.random() < REVOKING_PART:
        faults.append(_of_contributor(K.CONTRIBUTOR_REVOKED, plan, of_revoking))
    return plan.with_faults(tuple(sorted(faults, key=lambda f: f.at_s)))


def _with_contributors(plan: Plan, draw: random.Random) -> Plan:
    """Return a plan in which contributors train, and the learner's buffer has room for them."""
    contributors, local_steps = draw.choice((1, 2, 2, 3)), draw.choice((1, 1, 2))
    merge = {
        "method": "in_step",
        "compression": draw.choice(("full", "four_bit")),
        "overlap": draw.choice(("wait", "eager", "delayed")),
        "local_steps": local_steps,
        "quorum": draw.choice((1.0, 1.0, 0.5)),
        "grace_s": draw.choice((0.0, 2.0)),
        "late_rounds": draw.choice((0, 0, 2)),
        "member_timeout_s": draw.choice((4.0, 15.0)),
        "restart_wait_s": draw.choice((1.0, 5.0)),
    }
    hands = plan.batch_groups * local_steps * contributors
    buffer_groups = hands * draw.choice((1, 2)) + draw.choice((0, 2))
    return replace(
        plan,
        contributors=contributors,
        merge=tuple(merge.items()),
        buffer_groups=buffer_groups,
        concurrency_groups=max(plan.concurrency_groups, 8),
    )


def _of_contributor(kind: FaultKind, plan: Plan, draw: random.Random) -> Fault:
    least_s, most_s = _LASTING_S.get(kind, (1.0, 8.0))
    # The first one stays, so that there is somebody who can go on.
    is_final = kind in (K.CONTRIBUTOR_GONE, K.CONTRIBUTOR_REVOKED)
    names = plan.contributor_names[1:] if is_final else plan.contributor_names
    target = draw.choice(names) if names else ""
    if kind is K.CONTRIBUTOR_JOINS:
        target = f"contributor-{plan.contributors + 1 + draw.randrange(2)}"
    return Fault(kind, draw.uniform(1.0, FAULTY_S), draw.uniform(least_s, most_s), target, draw.random())


def _drawn(kind: FaultKind, plan: Plan, draw: random.Random) -> Fault:
    least_s, most_s = _LASTING_S.get(kind, (1.0, 8.0))
    target = ""
    if kind in _OF_SAMPLER:
        # The first one stays sound, so that there is somebody who can go on.
        final = kind in (K.SAMPLER_GONE, K.REVOKED, K.QUARANTINED)
        target = draw.choice(plan.sampler_names[1:] if final else plan.sampler_names)
    elif kind in _OF_PEER:
        target = draw.choice((*plan.sampler_names, "learner", "coordinator"))
    return Fault(kind, draw.uniform(1.0, FAULTY_S), draw.uniform(least_s, most_s), target, draw.random())
