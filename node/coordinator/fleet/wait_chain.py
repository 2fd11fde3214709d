"""Who waits for whom, from the run down to the cause, and what to do about it; pure.

    the run --> the learner --> what it waits for            (a disk, an upload, groups)
                     '-- groups --> the samplers, by what most of them wait for

Each link is from the coordinator's own state: a peer's wait is the name that its heartbeats give it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from node.coordinator.fleet.headline import Facts
from node.run import Wait

WAITS_SHOWN: Final = 3
"""Kinds of waits of samplers in a chain, those of most samplers first."""

UNNAMED: Final = "nothing that it names"

REMEDIES: Final[Mapping[str, str]] = {
    # the learner
    "rollout groups": "",
    "policy upload": "The link from the learner is slow or cut: see the learner's log.",
    "step acknowledgement": "The coordinator's disk is slow or full: see the coordinator's log.",
    "evaluation": "Held-out prompts are being answered, see `status`; evaluation.prompts asks fewer.",
    "checkpoint": "The learner's disk is slower than its steps, or learner.journal_bytes is small.",
    "disk": "Free space on the learner's disk; it goes on by itself.",
    "newest ledger": "Restore the newest copy with `heterorl-node ledger restore`, or accept the loss.",
    # samplers
    "task that loads here": "The task or its grader cannot be loaded there: that sampler's log says why.",
    "task that works": "Its last leases all failed: that sampler's log says why.",
    "task that samplers agree on": "Their tasks have other numbers of prompts: set coordinator.prompts.",
    "hub": "That sampler cannot reach the hub that its leases come from: check its link.",
    "policy version": "Its version is older than coordinator.max_staleness_versions: put a relay near it.",
    "policy fetch": "It fetches a version that it needs: its link is slow, a relay would help.",
    "prompt lease": "It has asked, and the coordinator has none at the moment.",
    "prompt lease: concurrency": "Raise coordinator.concurrency_groups: as many groups are leased.",
    "prompt lease: staleness": "The learner is the slower part: no more groups could be used in time.",
    "prompt lease: buffer": "The learner is the slower part: the spool is full (coordinator.buffer_groups).",
    "prompt lease: bytes": "The learner is the slower part: the spool is full (coordinator.buffer_bytes).",
    "prompt lease: share": "It holds all that it may: a newcomer's share grows with each group.",
    "prompt lease: faults": "Most of its leases fail: see that sampler's log; then `heterorl-node pardon`.",
    "prompt lease: quarantine": "It is quarantined: `status` says why; then `heterorl-node pardon`.",
    "prompt lease: learner": "The learner has not found the ledger whole since the coordinator's start.",
    "prompt lease: ledger": "The ledger is behind the learner: `status` says by which steps.",
    "prompt lease: task": "Nobody has said yet how many prompts the task has.",
    "prompt lease: prompts": "All prompts are leased or set aside; `status` lists the latter.",
    "prompt lease: grader": "Its grader's code is not the run's: install the same everywhere.",
    # verifiers
    "task whose rewards can be checked": "Its grader does not say that it repeats itself (noise_ratio).",
    "coordinator's clock": "The coordinator's clock is wrong; nothing else needs to be done.",
    "this machine's clock": "That machine's clock is wrong; nothing else needs to be done.",
}
"""Name of a wait, as peers give it -> what to do; empty: the next link of the chain says it."""


@dataclass(frozen=True, slots=True)
class WaitingSamplers:
    """The live samplers that name the same wait."""

    waits_for: str
    node_ids: tuple[str, ...]
    """Some of them, those that wait longest first."""
    peers: int
    for_s: float
    """The longest wait among them, seconds."""


def remedy(waits_for: str) -> str:
    """Return what to do about a wait that a peer names; empty: nothing is known of it."""
    name = waits_for if waits_for in REMEDIES else waits_for.partition(":")[0]
    return REMEDIES.get(name, "")


def chain(facts: Facts, samplers: Sequence[WaitingSamplers], *, learner_for_s: float) -> tuple[Wait, ...]:
    """Return who waits for whom, the run first; empty: it moves.

    Args:
        samplers: By what they wait for.
        learner_for_s: Since the learner names the wait that it names now.
    """
    return tuple(_links(facts, samplers, learner_for_s))


def _links(facts: Facts, samplers: Sequence[WaitingSamplers], learner_for_s: float) -> Iterator[Wait]:
    learner = facts.learner_waits_for
    if facts.ledger_gap:
        yield Wait("the run", "the newest ledger", facts.started_for_s, REMEDIES["newest ledger"])
    elif not facts.live_learners:
        unheard_s = facts.learner_unheard_s
        yield Wait(
            "the run",
            "the learner",
            facts.started_for_s if unheard_s is None else unheard_s,
            "Start the learner, or see its log: it is not in the run, or its heartbeats do not arrive.",
        )
    elif learner.startswith("done"):
        yield Wait("the run", "nothing: it is over", learner_for_s, f"The learner is {learner}.")
    elif not facts.live_samplers:
        unheard_s = facts.sampler_unheard_s
        yield Wait(
            "the run",
            "a sampler",
            facts.started_for_s if unheard_s is None else unheard_s,
            "Start samplers (`heterorl-node token` lets them in), or see the logs of those that were here.",
        )
    elif not facts.is_confirmed:
        yield Wait("samplers", "the learner to find the ledger whole", facts.started_for_s, "")
        told = remedy(learner) or "It says so a moment after it has joined; if it does not, see its log."
        yield Wait("the learner", learner or UNNAMED, learner_for_s, told)
    elif not facts.is_task_known:
        yield Wait(
            "samplers",
            "agreement on how many prompts the task has",
            facts.started_for_s,
            REMEDIES["task that samplers agree on"],
        )
    elif facts.idle_s:
        yield Wait(
            "the learner",
            "a group that teaches something",
            facts.idle_s,
            "All rewards of a group are equal: see `heterorl-node samples`.",
        )
    elif facts.ready_groups < facts.batch_groups:
        ready = f"groups: {facts.ready_groups} of {facts.batch_groups} are ready"
        yield Wait("the learner", ready, learner_for_s or facts.version_for_s, "")
        yield from _of_samplers(samplers)
    elif learner and learner != "rollout groups":
        yield Wait("the run", "the learner", facts.version_for_s, "")
        yield Wait("the learner", learner, learner_for_s, remedy(learner))


def _of_samplers(samplers: Sequence[WaitingSamplers]) -> Iterator[Wait]:
    ordered = sorted(samplers, key=lambda one: (-one.peers, one.waits_for))
    for one in ordered[:WAITS_SHOWN]:
        some = ", ".join(one.node_ids) + (", ..." if one.peers > len(one.node_ids) else "")
        who = f"{one.peers} sampler{'s'[: one.peers != 1]}: {some}"
        told = remedy(one.waits_for)
        if not one.waits_for:
            told = "It generates. If that lasts, `heterorl-node try` there shows its speed."
        yield Wait(who, one.waits_for or UNNAMED, one.for_s, told)
