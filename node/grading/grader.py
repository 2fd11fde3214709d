"""Graders of the task ``jsonl``: what each declares and does. ``node.grading.registry`` finds one by name.

One class says everything about a grader: the table of its options in ``[coordinator.task_options]``, the keys
that its peers have in ``[sampler]`` and ``[verifier]``, which rows it can grade, what it needs of a peer, and
how it grades. Nothing else names it.

    coordinator          check_row, for each row of the data
    sampler, verifier    needs_of, before there is a process
    its process          start, once; then grade_group, for each group
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

from pydantic import BaseModel

from node.errors import ConfigError
from node.grading.completion import CompletionText, Graded, Outage, Row
from node.questions.answer_part import answer_part
from node.questions.right_answer import answer_texts
from node.system.extras import NeededPackage
from node.tasks.task_options import QuestionOptions, TaskNeeds

TIMED_NOISE: Final = 0.02
"""Share of groups in which a grader with time limits may differ the second time, on a busier machine."""


class GradingPeer(Protocol):
    """The configuration of a peer that grades: section and limits, and the keys of every grader."""

    section: ClassVar[str]

    @property
    def grader_wall_limit_s(self) -> float: ...

    @property
    def grader_memory_limit_bytes(self) -> int: ...


class AnswerGrader:
    """Grades the answers to a row; this one's subclasses say by what.

    Most compare: they define ``grade``. Those that need more than answers define ``grade_group``.
    """

    table: ClassVar[type[BaseModel] | None] = None
    """Its options: a table of its name in [coordinator.task_options], which may be left out if each option
    has a default; None: none."""
    settings: ClassVar[type[BaseModel] | None] = None
    """Keys that its peers have in [sampler] and [verifier], each with a default; None: none."""
    package: ClassVar[str | None] = None
    """A package that only its peers need."""
    noise_ratio: float | None = None
    """As of ``Task``: 0.0 where the same completion always gets the same reward."""
    sees_tokens: bool = False
    """As of ``Task``."""

    def __init__(self, name: str, question: QuestionOptions, options: Any = None) -> None:
        """Keep what the run asks for.

        Args:
            options: Of the class ``table``; None where there is none.
        """
        self.name = name
        self.question = question
        self.options = options
        self.outages: Counter[Outage] = Counter()
        """Attempts that failed; the process of the grader takes them away."""

    @property
    def reads_answer(self) -> bool:
        """Whether rows need the column with the right answer."""
        return True

    @property
    def shows_answer(self) -> bool:
        """Whether what is graded is the answer, as ``answer_from`` finds it, for people who look at it."""
        return True

    def check_row(self, row: Row) -> None:
        """Check a row; RowError: no completion could be graded."""
        self.right_answers(row)

    def right_answers(self, row: Row) -> tuple[str, ...]:
        """Return the right answers of a row as texts, any of which is right; RowError: it has none."""
        return answer_texts(row, self.question.answer) if self.reads_answer else ()

    def compared_part(self, answer: str, rights: Sequence[str]) -> str | None:
        """Return what of an answer is compared, for people; None: all of it, or something else."""
        return None

    @classmethod
    def needed_packages(cls, peer: Any) -> tuple[NeededPackage, ...]:
        """Return the packages that a peer's ``settings`` need; ``peer``: has them among its own keys."""
        return ()

    @classmethod
    def check_peer(cls, peer: Any) -> None:
        """Check that what a peer's ``settings`` allow works here; blocks for a moment.

        Raises:
            ConfigError, StartupError: it does not.
        """

    def needs_of(self, peer: Any, *, group_size: int) -> TaskNeeds:
        """Return what the grader needs of a peer, as ``TaskOptions.needs_of`` does."""
        return TaskNeeds()

    def start(self, local: Mapping[str, Any]) -> None:
        """Prepare in the grader's own process; ``local``: what ``needs_of`` returned."""

    def grade_group(self, row: Row, completions: Sequence[CompletionText]) -> list[Graded]:
        """Grade the completions of one row."""
        return self.grade(row, [self.answer_of(completion) for completion in completions])

    def grade(self, row: Row, answers: Sequence[str | None]) -> list[Graded]:
        """Grade answers, None where a completion has none."""
        raise NotImplementedError

    def answer_of(self, completion: CompletionText) -> str | None:
        """Return what of a completion is graded, stripped; None: it has no answer."""
        return answer_part(completion.text, completion.finish, self.question).stripped


def option_refused(option: str, value: str, rule: str, way_out: str) -> ConfigError:
    """Return the error of a peer that does not allow what an option of the run asks for."""
    return ConfigError(
        key=f"coordinator.task_options.{option}",
        value=value,
        source="the coordinator",
        rule=rule,
        fix=f"{way_out}, or change the task's options.",
    )


def check_time(peer: GradingPeer, needed_s: float, because: str, other_fix: str) -> None:
    """Raise ConfigError where a peer's time for a group is less than ``needed_s``."""
    if peer.grader_wall_limit_s < needed_s:
        least = math.ceil(needed_s)
        raise ConfigError(
            key=f"{peer.section}.grader_wall_limit_s",
            value=peer.grader_wall_limit_s,
            source="the configuration",
            rule=f"must be at least {least} for this run: {because}",
            fix=f"Set it to {least}. {other_fix}",
        )
