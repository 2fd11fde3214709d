"""How many more groups may be leased; pure.

The staleness bound is kept by leasing less, not by throwing finished work away: a group is leased only if the
learner will still want it, however slowly it is sampled.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    concurrency_groups: int
    buffer_groups: int
    batch_groups: int
    max_staleness_versions: int
    buffer_bytes: int
    verifiers_grade: bool = False

    @property
    def unchecked_groups(self) -> int:
        """Groups that may wait for verifiers while more are leased; the rest is for those under way."""
        return max(self.batch_groups, self.buffer_groups // 2)


@dataclass(frozen=True, slots=True)
class Load:
    """Groups in flight, counted from the ledger."""

    running_groups: int
    """Leased and not submitted."""
    untrained_groups: int
    """Submitted, neither refused nor trained on; those that a verifier is to grade first are among them."""
    trained_groups: int
    version: int
    untrained_bytes: int = 0
    ungraded_groups: int = 0
    batchless_steps: int = 0
    """Steps without a batch among ``trained_groups``: their records were lost, or a rollback made them."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many groups may be leased now, >= 0, and the bound that is tightest."""

    groups: int
    bound: str
    """concurrency, staleness, buffer, bytes or, where verifiers grade, grading; or what is not there yet:
    learner, ledger or task."""


def capacities(bounds: Bounds, load: Load, *, behind_versions: int = 0) -> dict[str, int]:
    """Return the room under each bound by name; negative where it is overdrawn.

    staleness: (S + version + 1) * batch - (accepted + running), where accepted counts every
    group ever submitted and not refused. Source: AReaL, arXiv:2505.24298, where samplers hold the learner's
    version; here version is what the sampler holds.
    """
    untrained, running = load.untrained_groups, load.running_groups
    accepted = untrained + load.trained_groups + load.batchless_steps * bounds.batch_groups
    horizon = bounds.max_staleness_versions + load.version - behind_versions + 1
    grading = {"grading": bounds.unchecked_groups - load.ungraded_groups} if bounds.verifiers_grade else {}
    return {
        **grading,
        "concurrency": bounds.concurrency_groups - running,
        "staleness": horizon * bounds.batch_groups - (accepted + running),
        "buffer": bounds.buffer_groups - (untrained + running),
        "bytes": _bytes_room(bounds, load),
    }


def is_full(bounds: Bounds, *, untrained_groups: int, untrained_bytes: int, group_bytes: int) -> bool:
    """Return whether a group of so many bytes is one too many for the buffer, which always takes a batch."""
    over_bytes = untrained_bytes + group_bytes > bounds.buffer_bytes
    return untrained_groups >= (bounds.batch_groups if over_bytes else bounds.buffer_groups)


def _bytes_room(bounds: Bounds, load: Load) -> int:
    """Return how many more groups of the mean size fit; at least a batch always does."""
    groups = bounds.buffer_groups
    if load.untrained_bytes:
        groups = bounds.buffer_bytes * load.untrained_groups // load.untrained_bytes
    return max(groups, bounds.batch_groups) - (load.untrained_groups + load.running_groups)


def capacity(bounds: Bounds, load: Load, *, behind_versions: int = 0) -> Capacity:
    """Return the room under the tightest bound; see ``capacities``."""
    rooms = capacities(bounds, load, behind_versions=behind_versions)
    bound, groups = min(rooms.items(), key=lambda item: item[1])
    return Capacity(max(0, groups), bound)
