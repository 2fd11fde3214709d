"""How much of a batch samplers may move whose rewards have hardly been checked; pure.

Of the groups that the learner has been sent and has not trained on, newcomers' are at most a part of a batch,
so that no batch holds more of them; the others wait in the spool. That holds while a vetted sampler is at
work, with leases or with groups to be sent. Without one, as in a run that has no verifier, newcomers fill
whole batches: the run would stand still otherwise.
"""

from collections.abc import Set

from node.coordinator.work.open_slots import OpenSlots


def newcomers_wait(slots: OpenSlots, vetted: Set[str], *, most: int) -> bool:
    """Return whether the learner has ``most`` groups of newcomers while a vetted sampler is at work."""
    if not vetted:
        return False
    is_at_work = not slots.by_holder.keys().isdisjoint(vetted) or any(
        slots.by_number[number].winning_holder in vetted for number in slots.undelivered
    )
    return is_at_work and most <= sum(
        slots.by_number[number].winning_holder not in vetted for number in slots.delivered()
    )
