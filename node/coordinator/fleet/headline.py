"""The first line of the status: what the run does now, what it waits for, and since when; pure.

The causes are asked in the order in which one hides the next: without a learner it does not matter that no
group has come.
"""

from dataclasses import dataclass

from node.run import Headline


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
    is_task_known: bool
    """Whether somebody has said how many prompts the task has."""
    live_learners: int
    learner_unheard_s: float | None
    """Since the learner was last heard of; None: not since the coordinator started."""
    learner_waits_for: str
    live_samplers: int
    sampler_unheard_s: float | None
    """Since the last sampler was heard of; None: none was."""
    idle_s: float
    """Since a batch taught something; 0 where the newest one did."""
    capacity_groups: int
    capacity_bound: str
    ready_groups: int
    """Finished and not trained on."""
    batch_groups: int


def headline(facts: Facts) -> Headline:
    """Return the first line of the status."""
    version = "no version yet" if facts.version is None else f"version {facts.version}"
    if facts.ledger_gap:
        return Headline(f"nothing is leased at {version}", "the newest ledger", facts.started_for_s)
    if not facts.live_learners:
        unheard_s = facts.learner_unheard_s
        return Headline(
            f"{facts.live_samplers} samplers go on with {version}",
            "a learner" if unheard_s is None else "the learner, which is not heard of",
            facts.started_for_s if unheard_s is None else unheard_s,
        )
    if not facts.live_samplers:
        unheard_s = facts.sampler_unheard_s
        return Headline(
            f"the learner holds {version}",
            "samplers",
            facts.started_for_s if unheard_s is None else unheard_s,
        )
    if not facts.is_confirmed:
        return Headline(
            f"nothing is leased at {version}", "the learner to find the ledger whole", facts.started_for_s
        )
    if not facts.is_task_known:
        return Headline(
            "nothing is leased", "samplers to agree how many prompts the task has", facts.started_for_s
        )
    if facts.idle_s:
        return Headline(f"batches are consumed at {version}", "a group that teaches something", facts.idle_s)
    return _training(facts, version)


def _training(facts: Facts, version: str) -> Headline:
    ready, batch = facts.ready_groups, facts.batch_groups
    if ready < batch:
        doing = f"{facts.live_samplers} samplers fill the batch after {version}"
        return Headline(doing, f"groups: {ready} of {batch} are ready", facts.version_for_s)
    if not facts.capacity_groups and facts.learner_waits_for:
        doing = f"{ready} groups are ready after {version}"
        return Headline(doing, f"the learner, which waits for {facts.learner_waits_for}", facts.version_for_s)
    if not facts.capacity_groups:
        doing = f"the learner trains after {version}, {ready} groups are ready"
        return Headline(doing, f"the learner: room is bound by {facts.capacity_bound}", facts.version_for_s)
    return Headline(f"training after {version}, {ready} groups are ready", "", facts.version_for_s)
