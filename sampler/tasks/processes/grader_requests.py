"""Requests to the process of a task, and its answers; errors where those cannot be used.

describe --> TaskDescription        prompt, reply --> a text or messages        grade --> Grades
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from node.values.groups.failure import Failure
from node.values.limits import GROUP_METRICS, METRIC_NAME_PATTERN, METRIC_VALUE, REWARD
from sampler.tasks.processes.grader_worker import PROMPT_CHARACTERS
from sampler.tasks.task import CompletionText, Message

MOST_TURNS: Final = 1024
"""Most turns that a task may declare: each is a request of its own, to the engine and to the task."""


class TaskError(Exception):
    """A task did not deliver a prompt or its rewards; ``fault``: what is wrong with the prompt, if it is."""

    def __init__(self, what: str, *, fault: Failure | None) -> None:
        super().__init__(what)
        self.fault = fault


class TaskUnusableError(TaskError):
    """The class that the task's path names cannot be imported, instantiated or used."""


class TaskChangedError(TaskError):
    """The task's code on the disk is not what it was when the first process loaded it."""


class TaskDescription(BaseModel):
    """A task's own declarations."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompts: int | None = Field(ge=1)
    """None: one for each row of the run's data."""
    is_stateful: bool = False
    """Whether the process that made a prompt also has to grade it."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are set aside; None: only the model's own limit counts."""
    max_turns: int = Field(default=1, ge=1, le=MOST_TURNS)
    """Turns of a completion at most; 1: the task does not reply."""
    noise_ratio: float | None = Field(default=None, ge=0, le=0.1)
    """Share of groups in which an honest second grading may differ; None: it may differ in any."""
    sees_tokens: bool = False
    """Whether the grader is sent token ids and the rendered prompt."""
    template_arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as tools."""
    code_digest: Annotated[bytes, BeforeValidator(lambda text: bytes.fromhex(str(text)))] = b""
    """Digest of the code that was loaded."""


class Request(Enum):
    """A kind of request: who answers it, and the faults to report if it fails."""

    PROMPT = ("prompt()", Failure.PROMPT_FAILED, Failure.PROMPT_TIMED_OUT)
    REPLY = ("reply()", Failure.GRADING_FAILED, Failure.GRADING_TIMED_OUT)
    GRADE = ("the grader", Failure.GRADING_FAILED, Failure.GRADING_TIMED_OUT)

    def __init__(self, who: str, failed: Failure, timed_out: Failure) -> None:
        self.who, self.failed, self.timed_out = who, failed, timed_out

    def error(self, what: str) -> TaskError:
        """Return the error for an answer that cannot be used."""
        return TaskError(f"{self.who} {what}", fault=self.failed)


_Reward = Annotated[float, Field(ge=-REWARD, le=REWARD, allow_inf_nan=False)]
_Name = Annotated[str, StringConstraints(pattern=f"^{METRIC_NAME_PATTERN}$")]
_Metric = Annotated[float, Field(ge=-METRIC_VALUE, le=METRIC_VALUE, allow_inf_nan=False)]


class Grades(BaseModel):
    """A grader's answer about the completions of a group."""

    model_config = ConfigDict(frozen=True, strict=True)

    rewards: list[_Reward | None]
    """One for each completion; None: the grader abstained. At least one has a reward."""
    metrics: dict[_Name, list[_Metric | None]] = Field(default_factory=dict, max_length=GROUP_METRICS)
    """Name -> a number for each completion; None where the grader returned none."""

    @property
    def as_floats(self) -> list[float]:
        """The rewards, NaN where the grader abstained."""
        return [math.nan if reward is None else reward for reward in self.rewards]


def given(completions: Sequence[CompletionText]) -> dict[str, Any]:
    """Return completions of one prompt as a request has them; what most graders do not see is left out."""
    each = [
        (c.text, c.tokens, c.finish)
        if not c.conversation and c.measured is None and not c.token_ids
        else (c.text, c.tokens, c.finish, c.conversation, c.measured, c.token_ids)
        for c in completions
    ]
    rendered = next((c.prompt for c in completions), "")
    return {"completions": each, **({"rendered": rendered} if rendered else {})}


def grades_in(reply: dict[str, Any], completions: Sequence[CompletionText]) -> Grades:
    """Return what a grader answered about completions; TaskError if it is something else."""
    if isinstance(odd := reply.get("odd"), str):
        raise Request.GRADE.error(odd)
    try:
        grades = Grades.model_validate(reply)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise Request.GRADE.error(f"returned {fault['input']!r:.100} for {where}: {fault['msg']}") from error
    columns: dict[str, Sequence[Any]] = {"rewards": grades.rewards, **grades.metrics}
    for name, column in columns.items():
        if len(column) != len(completions):
            raise Request.GRADE.error(f"returned {len(column)} {name} for {len(completions)} completions")
    if all(reward is None for reward in grades.rewards):
        raise Request.GRADE.error(f"abstained from all {len(completions)} completions")
    return grades


def said_in(reply: dict[str, Any], kind: Request) -> str | list[Message]:
    """Return a text or messages that were answered; TaskError if it is something else."""
    if "too_long" in reply:
        fault = Failure.PROMPT_TOO_LONG if kind is Request.PROMPT else kind.failed
        what = f"{kind.who} returned {reply['too_long']} characters; at most {PROMPT_CHARACTERS} are allowed"
        raise TaskError(what, fault=fault)
    if isinstance(messages := reply.get("messages"), list):
        return messages
    if not isinstance(text := reply.get("text"), str):
        raise kind.error(reply.get("odd", "returned no text"))
    return text
