"""How many prompts the run's task has, and who said so; pure.

    configured: every sampler must agree
    not configured: the first sampler's number goes into the ledger, and every other sampler must agree

The order of prompts depends on their number, so nothing is leased before it is known.
"""

from dataclasses import dataclass

from node.errors import Reason, RefusedError


@dataclass(frozen=True, slots=True)
class TaskSize:
    """The number of prompts of a task, as a sampler found it."""

    name: str
    prompts: int
    said_by: str
    """Node id of the first sampler that reported it."""


def agreed_size(
    known: TaskSize | None,
    *,
    task: str,
    configured: int | None,
    prompts: int,
    held_out: int = 0,
    sampler_id: str,
) -> TaskSize | None:
    """Return the size to note; None where it is noted already.

    Args:
        known: As noted before; None: not yet.
        configured: ``coordinator.prompts``; None: unset.
        prompts: What the sampler ``sampler_id`` found.
        held_out: How many of them are for evaluation.
    Raises:
        RefusedError: TASK_MISMATCH.
    """
    if configured is not None and configured != prompts:
        raise RefusedError(
            Reason.TASK_MISMATCH,
            f"coordinator.prompts = {configured}, and task {task!r} of sampler {sampler_id} "
            f"has {prompts} prompts",
            fix=f"set coordinator.prompts = {prompts} or leave it out, or give this sampler the others' task",
        )
    if prompts <= held_out:
        raise RefusedError(
            Reason.TASK_MISMATCH,
            f"task {task!r} of sampler {sampler_id} has {prompts} prompts, and the last {held_out} are held "
            "out for evaluation: none is left to train on",
            fix="lower coordinator.evaluation.prompts and restart the coordinator",
        )
    if known is not None and known.prompts == prompts:
        return None
    if known is not None and configured is None:
        raise RefusedError(
            Reason.TASK_MISMATCH,
            f"task {task!r} of sampler {sampler_id} has {prompts} prompts, "
            f"this run has {known.prompts} since sampler {known.said_by} joined",
            fix="give every sampler the same task (sampler.custom_tasks and its data); "
            f"if {prompts} is right, set coordinator.prompts = {prompts} and restart the coordinator",
        )
    return TaskSize(task, prompts, sampler_id)
