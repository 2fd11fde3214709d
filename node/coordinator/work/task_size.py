"""How many prompts the run's task has, and who said so; pure.

    the coordinator has the rows: as many as are trained on
    configured: every sampler must agree
    not configured: the first sampler's number goes into the ledger, and every other sampler must agree

The order of prompts depends on their number, so nothing is leased before it is known.
"""

from dataclasses import dataclass, replace
from typing import Final

from node.errors import ConfigError, Reason, RefusedError


@dataclass(frozen=True, slots=True)
class TaskSize:
    """The number of prompts of a task, as a sampler found it."""

    name: str
    prompts: int
    said_by: str
    """Node id of the first sampler that reported it."""


@dataclass(frozen=True, slots=True)
class DataSeen:
    """The rows that a run's prompts are made from, as the coordinator found them."""

    digest: bytes
    rows: int
    evaluation_rows: int
    """Those that are never trained on."""
    held_out_at: int = 0
    """Number of the first of them: they were the last ones when the run began, and keep their numbers."""
    first_slot: int = 0
    """The first slot that asks for any of these rows; those before it were drawn from fewer."""

    def __str__(self) -> str:
        if not self.rows:
            return "no data"
        held_out = f"{self.evaluation_rows} held out from row {self.held_out_at} on"
        return f"{self.rows} rows, digest {self.digest.hex()[:12]}, {held_out}"


NO_DATA: Final = DataSeen(b"", 0, 0)


def agreed_data(known: DataSeen, found: DataSeen, *, known_part: bytes, next_slot: int) -> DataSeen | None:
    """Return the data to note; None where nothing changes.

    Args:
        known: As noted before.
        found: Now; its ``first_slot`` does not count.
        known_part: Digest of as many of the rows found as were known, in the order of their numbers.
        next_slot: The first slot that was never leased; 0: nothing was, and everything may change.
    Raises:
        ConfigError: The data is not the run's, nor the run's with rows added: a slot would ask for another
            prompt than before, and rows that were trained on could be held out.
    """
    found = replace(found, first_slot=known.first_slot if next_slot else 0)
    if found == known:
        return None
    if not next_slot:
        return found
    held_out = (known.evaluation_rows, known.held_out_at)
    is_same = known_part == known.digest and (found.evaluation_rows, found.held_out_at) == held_out
    if known.rows and found.rows > known.rows and is_same:
        return replace(found, first_slot=next_slot)
    raise ConfigError(
        key="coordinator.data",
        value=str(found),
        source="the configuration",
        rule=f"this run began with {known}",
        fix="Put data and evaluation_rows back as they were: rows may only be added at the end of file. Or "
        "begin another run with `heterorl-node init`.",
    )


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
