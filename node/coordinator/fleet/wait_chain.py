"""The run's headline, and who waits for whom down to the cause, since when, and what to do; pure.

    the run --> the coordinator's own fault                  (its disk, its database)
    the run --> the learner --> what it waits for            (a disk, an upload, groups)
                     |-- groups --> the samplers, by what most of them wait for
                     '-- contributions --> the contributors, likewise

The causes are asked in the order in which one hides the next: without a learner it does not matter that no
group has come. Each link is from the coordinator's own state: a peer's wait is the name that its heartbeats
give it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from node.text.wording import counted
from node.values.run import Headline, Wait

WAITS_SHOWN: Final = 3
"""Kinds of waits of samplers or contributors in a chain, those of most peers first."""

UNNAMED: Final = "nothing that it reports"

_GENERATES: Final = "It generates. If that lasts, `heterorl-node try` there shows its speed."
_TRAINS: Final = (
    "It trains. Where it is always the last, learner.merge.quorum below 1 lets merges go on without it."
)

_PACE: Final = "The first line of `status` says whether that bounds the pace of the run."

ROLLOUT_GROUPS: Final = "rollout groups"
"""The learner's wait for the samplers."""

CONTRIBUTORS: Final = "contributors"
CONTRIBUTIONS: Final = "contributions"
"""Waits of a learner that merges: nobody is connected; somebody, whom it names, has yet to hand in."""

DONE: Final = "done"
"""Beginning of a learner's wait once it has ended."""

REMEDIES: Final[Mapping[str, str]] = {
    # the learner
    ROLLOUT_GROUPS: "",
    CONTRIBUTIONS: "",
    "policy upload": "The link from the learner is slow or cut: see the learner's log.",
    "step acknowledgement": "The coordinator's disk is slow or full: see the coordinator's log.",
    "evaluation": "Held-out prompts are being answered, see `status`; evaluation.prompts asks fewer.",
    "checkpoint": "The learner's disk is slower than its steps, or learner.journal_bytes is small.",
    "disk": "Free space on the learner's disk; it goes on by itself.",
    CONTRIBUTORS: "No contributor is connected: start one, or see its log and learner.merge.listen.",
    "newest ledger": "Restore the newest copy with `heterorl-node ledger restore`, or accept the loss.",
    # contributors
    "learner that merges": "It does not reach the learner, see contributor.learner and its log.",
    "groups dealt": "The learner has admitted none that others do not hold: samplers are the slower part.",
    "merged version": "The learner waits for the other contributors, or the merged version is on its way.",
    # samplers
    "graders": "Groups wait for their grades: raise sampler.grader_processes, or make the grader faster.",
    "groups at once": f"Its engine has room for more than sampler.concurrency_groups there. {_PACE}",
    "submission": "Finished groups wait to be submitted: its link is slow, or the hub is away.",
    "task that loads here": "The task or its grader cannot be loaded there: that sampler's log says why.",
    "task that works": "Its last leases all failed: that sampler's log says why.",
    "hub": "That sampler cannot reach the hub that its leases come from: check its link.",
    "policy version": "Its version is older than coordinator.max_staleness_versions: put a relay near it.",
    "policy fetch": "It fetches a version that it needs: its link is slow, a relay would help.",
    "prompt lease": "It has asked, and the coordinator has none at the moment.",
    "prompt lease: concurrency": f"coordinator.concurrency_groups groups are leased. {_PACE}",
    "prompt lease: staleness": f"coordinator.max_staleness_versions allows no more groups yet. {_PACE}",
    "prompt lease: buffer": f"coordinator.buffer_groups groups are on their way or spooled. {_PACE}",
    "prompt lease: bytes": f"coordinator.buffer_bytes of groups are spooled. {_PACE}",
    "prompt lease: grading": "Verifiers are the slower part, or none is here: start more of them.",
    "prompt lease: share": "It holds all that it may: a newcomer's share grows with each group.",
    "prompt lease: checks": "Its groups wait to be checked: they are slow to grade, or verifiers are.",
    "prompt lease: faults": "Most of its leases fail: see that sampler's log; then `heterorl-node pardon`.",
    "prompt lease: quarantine": "It is quarantined: `status` says why; then `heterorl-node pardon`.",
    "prompt lease: learner": "The learner has not found the ledger whole since the coordinator's start.",
    "prompt lease: ledger": "The ledger is behind the learner: `status` says by which steps.",
    "prompt lease: prompts": "All prompts are leased or set aside; `status` lists the latter.",
    "prompt lease: grader": "Its grader's code is not the run's: install the same everywhere.",
    "prompt lease: base model": "It has not said yet which base model it loads: that sampler's log says why.",
    "prompt lease: paused": "`heterorl-node resume` leases again.",
    "prompt lease: drained": "It is drained: stop it once it holds no leases, or `drain --undo`.",
    # verifiers
    "task whose rewards can be checked": "Its grader does not say that it repeats itself (noise_ratio).",
    "coordinator's clock": "The coordinator's clock is wrong; nothing else needs to be done.",
    "this machine's clock": "That machine's clock is wrong; nothing else needs to be done.",
}
"""Name of a wait, as peers give it -> what to do; empty: the next link of the chain says it."""

PASSING: Final = frozenset(
    {
        "policy upload", "step acknowledgement", "checkpoint", "evaluation",
        "task that loads here", "hub", "policy version", "policy fetch", "prompt lease",
    }
)  # fmt: skip
"""Waits that every run has for a moment; their remedies blame somebody, which is untrue before they last."""

PASSING_S: Final = 10.0
"""A fetch or an upload of a delta takes seconds over an ordinary link; so does a small checkpoint."""

WORK_AS_USUAL: Final = f"Nothing yet: this is work as usual where it lasts less than {PASSING_S:.0f} s."


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of the run as the coordinator knows it; times are seconds until now."""

    version: int | None
    """The newest announced; None: none yet."""
    version_for_s: float
    """Since it was announced; since the coordinator's start where there is none, or it is older."""
    started_for_s: float
    """Since the coordinator started."""
    ledger_gap: str
    is_confirmed: bool
    """Whether the learner has found the ledger whole."""
    live_learners: int
    learner_unheard_s: float | None
    """Since the learner was last heard of; None: not since the coordinator started."""
    learner_waits_for: str
    learner_waits_s: float
    """Since it names that wait."""
    live_samplers: int
    sampler_unheard_s: float | None
    """Since the last sampler was heard of; None: none was."""
    idle_s: float
    """Since a batch taught something; 0 where the newest one did."""
    capacity_groups: int
    capacity_bound: str
    ready_groups: int
    """Finished, graded and not trained on."""
    batch_groups: int
    own_fault: str = ""
    """A fault of the coordinator itself; empty: none."""
    own_fault_s: float = 0.0
    own_fault_fix: str = ""
    paused: str = ""
    """By whom and why; empty: the run is not paused."""
    paused_s: float = 0.0
    lacks_verifier: bool = False
    """Whether every group waits for a verifier, which the run requires."""
    ungraded_groups: int = 0
    """Finished, and not among the ready ones: a verifier grades them first."""
    ungraded_s: float = 0.0
    """Since the oldest of them is here."""
    verifiers: int = 0
    """Live ones."""

    @property
    def stands_still(self) -> bool:
        """Whether something is known for which no step comes."""
        is_over = self.learner_waits_for.startswith(DONE)
        is_held_up = self.own_fault or self.ledger_gap or self.paused or self.lacks_verifier or is_over
        return bool(is_held_up or not (self.live_learners and self.live_samplers and self.is_confirmed))


@dataclass(frozen=True, slots=True)
class WaitingPeers:
    """The live peers of a role that name the same wait."""

    waits_for: str
    node_ids: tuple[str, ...]
    """Some of them, those that wait longest first."""
    peers: int
    for_s: float
    """The longest wait among them, seconds."""


def remedy(waits_for: str, *, for_s: float = math.inf) -> str:
    """Return what to do about a wait that a peer names; empty: nothing is known of it.

    Args:
        for_s: how long it has lasted; a run that goes well has some waits again and again, for a moment.
    """
    name = waits_for if waits_for in REMEDIES else waits_for.partition(":")[0]
    return WORK_AS_USUAL if name in PASSING and for_s < PASSING_S else REMEDIES.get(name, "")


def explained(
    facts: Facts, samplers: Sequence[WaitingPeers], contributors: Sequence[WaitingPeers] = ()
) -> tuple[Headline, tuple[Wait, ...]]:
    """Return the first line of the status, and who waits for whom, the run first; no waits: it moves.

    The headline says what is done meanwhile, and what the first link waits for. ``samplers`` and
    ``contributors`` are told by what they wait for.
    """
    doing, links = _causes(facts, samplers, contributors)
    first = links[0] if links else Wait("the run", "", facts.version_for_s, "")
    return Headline(doing, first.waits_for, first.for_s), links


def _causes(
    facts: Facts, samplers: Sequence[WaitingPeers], contributors: Sequence[WaitingPeers]
) -> tuple[str, tuple[Wait, ...]]:
    """Return what is done, and who waits for whom."""
    version = "no version yet" if facts.version is None else f"version {facts.version}"
    learner, learner_s, started_s = facts.learner_waits_for, facts.learner_waits_s, facts.started_for_s
    if facts.own_fault:
        fault = Wait("the run", f"the coordinator: {facts.own_fault}", facts.own_fault_s, facts.own_fault_fix)
        return f"nothing new is taken in at {version}", (fault,)
    if facts.ledger_gap:
        gap = Wait("the run", "the newest ledger", started_s, REMEDIES["newest ledger"])
        return f"nothing is leased at {version}", (gap,)
    if facts.paused:
        what = f"an end to its pause {facts.paused}"
        resumed = Wait("the run", what, facts.paused_s, REMEDIES["prompt lease: paused"])
        return f"nothing new is leased at {version}", (resumed,)
    if not facts.live_learners:
        unheard_s = facts.learner_unheard_s
        absent = Wait(
            "the run",
            "a learner" if unheard_s is None else "the learner, which is not heard of",
            started_s if unheard_s is None else unheard_s,
            "Start the learner, or see its log: it is not in the run, or its heartbeats do not arrive.",
        )
        return f"{counted(facts.live_samplers, 'sampler', 'goes on/go on')} with {version}", (absent,)
    if learner.startswith(DONE):
        over = Wait("the run", "nothing: it is over", learner_s, f"The learner is {learner}.")
        return f"the learner holds {version}", (over,)
    if not facts.live_samplers:
        unheard_s = facts.sampler_unheard_s
        absent = Wait(
            "the run",
            "samplers",
            started_s if unheard_s is None else unheard_s,
            "Start samplers (`heterorl-node token` lets them in), or see the logs of those that were here.",
        )
        return f"the learner holds {version}", (absent,)
    if not facts.is_confirmed:
        told = (
            remedy(learner, for_s=learner_s)
            or "It says so a moment after it has joined; if it does not, see its log."
        )
        return f"nothing is leased at {version}", (
            Wait("samplers", "the learner to find the ledger whole", started_s, ""),
            Wait("the learner", learner or UNNAMED, learner_s, told),
        )
    if facts.lacks_verifier:
        told = (
            "Start one (`heterorl-node --role verifier`), see the log of the one that was here, or set "
            "coordinator.require_verifier = false."
        )
        for_s = learner_s or facts.version_for_s
        return f"{counted(facts.ready_groups, 'group', 'waits/wait')} at {version}", (
            Wait("the learner", "a verifier, without which nothing is trained on", for_s, told),
        )
    if facts.idle_s:
        told = "All rewards of a group are equal: see `heterorl-node samples`."
        teaching = Wait("the learner", "a group that teaches something", facts.idle_s, told)
        return f"batches are consumed at {version}", (teaching,)
    merge, _, late = learner.partition(": ")
    if merge == CONTRIBUTORS:
        absent = Wait("the learner", learner, learner_s, REMEDIES[CONTRIBUTORS])
        return f"nothing is trained on after {version}", (absent,)
    if merge == CONTRIBUTIONS:
        n = sum(one.peers for one in contributors)
        next_one = f"the merge of version {(facts.version or 0) + 1}"
        waiting = Wait(next_one, late, facts.version_for_s, "")
        return f"{counted(n, 'contributor', 'trains/train')} from {version}", (
            waiting,
            *_of_peers("contributor", contributors, at_work=_TRAINS),
        )
    is_short = bool(contributors) and merge == ROLLOUT_GROUPS
    if is_short or facts.ready_groups < facts.batch_groups:
        ready = f"groups: {facts.ready_groups} of {facts.batch_groups} are ready"
        if is_short:
            ready = f"groups: contributors have {facts.ready_groups} and ask for more"
        # It may have named this wait in one heartbeat after the other, and taken steps between them.
        waits_s = min(learner_s or facts.version_for_s, facts.version_for_s)
        missing = Wait("the learner", ready, waits_s, "")
        has_enough = facts.ready_groups + facts.ungraded_groups >= facts.batch_groups
        if facts.ungraded_groups and (has_enough or not facts.verifiers):
            return f"groups are graded at {version}", (missing, _of_verifiers(facts))
        doing = f"{counted(facts.live_samplers, 'sampler', 'fills/fill')} the batch after {version}"
        return doing, (missing, *_of_peers("sampler", samplers, at_work=_GENERATES))
    if learner and learner != ROLLOUT_GROUPS:
        slow = Wait("the learner", learner, learner_s, remedy(learner, for_s=learner_s))
        ready = counted(facts.ready_groups, "group", "is ready/are ready")
        return f"{ready} for the learner after {version}", (slow,)
    full = "" if facts.capacity_groups else f", and no more are leased (bound by {facts.capacity_bound})"
    return f"training at {version}, with {counted(facts.ready_groups, 'group')} ready{full}", ()


def _of_verifiers(facts: Facts) -> Wait:
    who = counted(facts.ungraded_groups, "group")
    if not facts.verifiers:
        told = "Start one (`heterorl-node --role verifier`), or see the log of the one that was here."
        return Wait(who, "a verifier, which grades them", facts.ungraded_s, told)
    told = "They are slower than the samplers, or cannot ask their grader: see their logs, or start more."
    who_grades = f"{counted(facts.verifiers, 'verifier')} to grade them"
    return Wait(who, who_grades, facts.ungraded_s, told)


def _of_peers(role: str, peers: Sequence[WaitingPeers], *, at_work: str) -> Iterator[Wait]:
    ordered = sorted(peers, key=lambda one: (-one.peers, one.waits_for))
    for one in ordered[:WAITS_SHOWN]:
        some = ", ".join(one.node_ids) + (", ..." if one.peers > len(one.node_ids) else "")
        who = f"{counted(one.peers, role)}: {some}"
        told = remedy(one.waits_for, for_s=one.for_s) if one.waits_for else at_work
        yield Wait(who, one.waits_for or UNNAMED, one.for_s, told)
