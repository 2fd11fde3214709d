"""How many prompts the run's task has, and who said so; pure.

    the coordinator has the rows: as many as are trained on
    configured: every sampler must agree
    not configured: the first sampler's number goes into the ledger, and every other sampler must agree

The order of prompts depends on their number, so nothing is leased before it is known.
"""

from dataclasses import dataclass
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
    """The last ones, which are never trained on."""

    def __str__(self) -> str:
        if not self.rows:
            return "no data"
        return f"{self.rows} rows, digest {self.digest.hex()[:12]}, the last {self.evaluation_rows} held out"


NO_DATA: Final = DataSeen(b"", 0, 0)


def agreed_data(known: DataSeen, found: DataSeen, *, has_leased: bool) -> DataSeen | None:
    """Return the data to note; None where nothing changes.

    Args:
        known: As noted before.
        found: Now.
        has_leased: Whether anything was ever leased. Before that, everything may change.
    Raises:
        ConfigError: The data is not the run's: a slot would ask for another prompt than before, and rows that
            were trained on could be held out.
    """
    if found == known:
        return None
    if not has_leased:
        return found
    raise ConfigError(
        key="coordinator.data",
        value=str(found),
        source="the configuration",
        rule=f"this run began with {known}",
        fix="Put data and evaluation_rows back as they were, or begin another run with `heterorl-node init`.",
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
