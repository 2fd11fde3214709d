"""Causes that may bound the pace of a run, and the waits of samplers that tell of each; values only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from node.values.bottleneck import BoundBy


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that may bound the pace of a run."""

    by: BoundBy
    remedy: str = ""
    """An action against it, for people."""
    setting: str = ""
    """Key, where it is a setting."""


def _setting(key: str, remedy: str) -> Cause:
    return Cause(BoundBy.SETTING, remedy, key)


LEARNER: Final = Cause(
    BoundBy.LEARNER,
    "Give it more compute, or raise coordinator.batch_groups, so that each step takes in more; the run would "
    "be just as fast with fewer samplers.",
)
CONTRIBUTORS: Final = Cause(BoundBy.CONTRIBUTORS, "Add contributors, or give them faster devices.")
EXCHANGE: Final = Cause(
    BoundBy.EXCHANGE,
    "Let changes travel less often (learner.merge.local_steps), beside the steps (overlap) or in fewer bytes "
    "(compression); or give learner and contributors a faster link.",
)
SAMPLERS: Final = Cause(BoundBy.SAMPLERS, "Add samplers, or give them faster devices.")
VERIFIERS: Final = Cause(BoundBy.VERIFIERS, "Start more verifiers, or make their graders faster.")
LINK: Final = Cause(
    BoundBy.LINK,
    "Put a relay near the samplers (sampler.weight_sources), raise coordinator.max_staleness_versions, or "
    "make steps longer (coordinator.batch_groups).",
)
DELIVERY: Final = Cause(
    BoundBy.LINK, "Groups are on their way to the learner: give it a faster link to the coordinator."
)
NEWCOMERS: Final = _setting(
    "coordinator.newcomers_part", "Raise it, or wait until verifiers have checked the newcomers' groups."
)
NOTHING: Final = Cause(BoundBy.NOTHING)

_STALENESS: Final = _setting(
    "coordinator.max_staleness_versions",
    "Raise it as far as the effective sample size allows: `status` says what the drift recommends.",
)
_BUFFER: Final = _setting("coordinator.buffer_groups", "Raise it to a few times coordinator.batch_groups.")
_BYTES: Final = _setting("coordinator.buffer_bytes", "Raise it: a few batches should fit.")

FULL_QUEUE: Final = frozenset({_STALENESS, _BUFFER, _BYTES})
"""Limits that say that enough groups are under way for the learner."""

WAITS: Final[Mapping[str, Cause]] = {
    "prompt lease: concurrency": _setting(
        "coordinator.concurrency_groups", "Raise it: samplers could work on more groups at once."
    ),
    "prompt lease: staleness": _STALENESS,
    "prompt lease: buffer": _BUFFER,
    "prompt lease: bytes": _BYTES,
    "prompt lease: prompts": _setting(
        "coordinator.prompt_retry_s", "Prompts are set aside because they fail: `status` says which and why."
    ),
    "prompt lease: grading": VERIFIERS,
    "prompt lease: checks": VERIFIERS,
    "graders": _setting(
        "sampler.grader_processes", "Raise it, or make the grader faster: groups wait there for their grades."
    ),
    "groups at once": _setting(
        "sampler.concurrency_groups", "Raise it, or leave it out: engines have room for more groups."
    ),
    "submission": LINK,
    "hub": LINK,
    "policy version": LINK,
}
"""Wait of a sampler -> what holds it back. All other waits leave it work to do."""

SHARE: Final = "prompt lease: share"
"""A sampler has its part of what the tightest limit of the coordinator leaves for all."""

UNFIT: Final = frozenset(
    {
        "prompt lease: faults", "prompt lease: quarantine", "prompt lease: grader",
        "prompt lease: base model", "prompt lease: drained", "task that loads here", "task that works",
    }
)  # fmt: skip
"""Waits of samplers that do no work for a reason of their own: they bound nothing."""

MERGED: Final = "merged version"
"""Wait of a contributor while its change and what is made of it travel, or others train."""

CAUSES: Final = frozenset(
    {LEARNER, CONTRIBUTORS, EXCHANGE, SAMPLERS, DELIVERY, NEWCOMERS, NOTHING, *WAITS.values()}
)


def held_back_by(wait: str, *, tightest_limit: str) -> Cause | None:
    """Return what holds back a sampler that names this wait; None: it generates.

    Args:
        tightest_limit: the coordinator's limit on leases that leaves the least room.
    """
    name = f"prompt lease: {tightest_limit}" if wait == SHARE else wait
    return WAITS.get(name) or WAITS.get(name.partition(":")[0])
