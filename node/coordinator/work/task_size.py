"""How many prompts the run's task has, and who said so; pure.

    the coordinator has the rows, the task's options name a number, or it is configured: every sampler must
    agree else: the number that most samplers found; of two, the one that was there first

One sampler's word is enough to begin with, and no more: a second one that found another number waits until a
third decides, or an operator. The order of prompts depends on their number, so nothing is leased before there
is one.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from node.coordinator.work.agreement import most_said
from node.errors import ConfigError, Reason, RefusedError
from node.fact import Fact


@dataclass(frozen=True, slots=True)
class TaskSize:
    """The number of prompts of a task, as samplers found it."""

    name: str
    prompts: int
    """0: nobody's word is left."""
    said_by: str
    """Node id of the sampler that decided it."""


@dataclass(frozen=True, slots=True)
class SizeWord:
    sampler_id: str
    task: str
    prompts: int
    """0: its word is taken back."""


@dataclass(frozen=True, slots=True)
class SizeAnswer:
    size: TaskSize | None = None
    """The run's from now on; None: as before."""
    word: SizeWord | None = None
    refusal: RefusedError | None = None


@dataclass(frozen=True, slots=True)
class DataSeen(Fact):
    """The rows that a run's prompts are made from, as the coordinator found them."""

    kind: ClassVar[str] = "data"

    digest: bytes
    rows: int
    evaluation_rows: int
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
    words: Mapping[str, int],
    prompts: int,
    held_out: int = 0,
    sampler_id: str,
) -> SizeAnswer:
    """Decide what the word of a sampler is worth. Raises RefusedError: TASK_MISMATCH."""
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
    word = None if words.get(sampler_id) == prompts else SizeWord(sampler_id, task, prompts)
    said = TaskSize(task, prompts, sampler_id)
    if configured is not None:
        return SizeAnswer(None if known is not None and known.prompts == prompts else said)
    if known is None or known.prompts == prompts:
        return SizeAnswer(None if known is not None else said, word)
    before = words if known.said_by in words else {**words, known.said_by: known.prompts}
    if before.get(sampler_id) == known.prompts:
        raise _mismatch(known, said, before, "start it with the data that it had before")
    votes = Counter({**before, sampler_id: prompts}.values())
    if votes[prompts] > votes[known.prompts]:
        return SizeAnswer(said, word)
    if votes[known.prompts] > 1 and votes[known.prompts] > votes[prompts]:
        return SizeAnswer(None, word, _mismatch(known, said, before, "give this sampler the others' task"))
    undecided = RefusedError(
        Reason.TASK_UNDECIDED,
        f"task {task!r} of sampler {sampler_id} has {prompts} prompts, sampler {known.said_by} found "
        f"{known.prompts}, and as many samplers say one as the other",
        fix="set coordinator.prompts and restart the coordinator, revoke the one that is wrong, or start "
        "another sampler: the majority decides",
    )
    return SizeAnswer(None, word, undecided)


def size_without(
    known: TaskSize | None, words: Mapping[str, int], gone: Collection[str]
) -> tuple[TaskSize | None, tuple[SizeWord, ...]]:
    """Return the size to note when the words of some samplers are taken back (None: as before), and those
    words."""
    if known is None:
        return None, ()
    before = words if known.said_by in words else {**words, known.said_by: known.prompts}
    taken = tuple(SizeWord(name, known.name, 0) for name in before if name in gone)
    left = {name: prompts for name, prompts in before.items() if name not in gone}
    prompts = most_said(left.values(), known.prompts) if left else 0
    if not taken or prompts == known.prompts:
        return None, taken
    said_by = next((name for name, said in left.items() if said == prompts), "")
    return TaskSize(known.name, prompts, said_by), taken


def dispute(known: TaskSize | None, words: Mapping[str, int]) -> str:
    """Return what samplers do not agree on, for people; empty: nothing."""
    if known is None or all(prompts == known.prompts for prompts in words.values()):
        return ""
    votes = Counter(words.values())
    said = ", ".join(
        f"{prompts} by {', '.join(sorted(name for name, n in words.items() if n == prompts)[:3])}"
        for prompts, _ in votes.most_common(3)
    )
    return f"samplers disagree on how many prompts task {known.name!r} has: {said}; {known.prompts} are used"


def _mismatch(known: TaskSize, said: TaskSize, words: Mapping[str, int], fix: str) -> RefusedError:
    agreeing = sum(prompts == known.prompts for prompts in words.values())
    return RefusedError(
        Reason.TASK_MISMATCH,
        f"task {said.name!r} of sampler {said.said_by} has {said.prompts} prompts, this run has "
        f"{known.prompts} since sampler {known.said_by} joined, as {agreeing} samplers say",
        fix=f"{fix} (sampler.custom_tasks and its data); if {said.prompts} is right, set "
        f"coordinator.prompts = {said.prompts} and restart the coordinator",
    )
