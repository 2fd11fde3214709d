"""Options of built-in tasks, checked at the coordinator before anything starts, and by samplers.

Options are data: the coordinator sends them to samplers as JSON. Each task declares its own, with what rows,
samplers and chat templates need for them; ``built_in_tasks`` says where. The options of a custom task are its
own business.
"""

import json
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from node.tasks.built_in_tasks import BUILT_IN
from node.values.limits import PROMPT_TOKENS, TASK_OPTIONS_BYTES

AnswerSource: TypeAlias = Literal["text", "last_line", "tags", "after_thinking", "boxed", "pattern"]
"""Where the answer stands in a completion; see ``PromptOptions.answer_from``."""

RESERVED_ARGUMENTS: Final = frozenset(
    {
        "messages",
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of transformers' own ``apply_chat_template``."""


@dataclass(frozen=True, slots=True)
class TaskNeeds:
    """Settings of a peer that the process of a task gets besides the run's options."""

    local: Mapping[str, Any] = field(default_factory=dict)
    """Parts of this peer's configuration: the argument ``local`` of the task; empty: it has none."""
    environment: tuple[str, ...] = ()
    """Names of variables of this peer's environment."""
    served_at: str = ""
    """Socket at which the process is started; empty: the peer starts it."""


class TaskOptions(BaseModel):
    """Options of a built-in task; without any, as here, it has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    takes_rows: ClassVar[bool] = False
    """Whether its prompts are the rows of ``[coordinator.data]``."""

    extra: ClassVar[str] = "tasks"
    """The extra that installs ``package``."""

    prompts_alone: ClassVar[bool] = False
    """Whether a peer that does not grade may make its prompts without what only graders need."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Option -> the column that it names, which rows need."""
        return {}

    @property
    def package(self) -> str | None:
        """The package that samplers need."""
        return None

    @property
    def prompts(self) -> int | None:
        """How many prompts it has; None: only samplers or the data can tell."""
        return None

    @property
    def named_code(self) -> tuple[str, str] | None:
        """An option that names code, and its import path, which each peer must allow; None: there is none."""
        return None

    @property
    def said_of_rows(self) -> str:
        """The words that are true of each row that ``check_row`` takes, for people."""
        return "each can be a prompt"

    @property
    def template_need(self) -> str | None:
        """Why the model must have a chat template; None: it need not."""
        return None

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Check that a row of the run's data can be a prompt, and that its completions can be graded.

        Raises:
            RowError: it cannot.
        """

    def needs_of(self, peer: Any, *, group_size: int) -> TaskNeeds:
        """Return what the task needs of a peer, whose ``GradingConfig`` is ``peer``; may block for a moment.

        Raises:
            ConfigError: the peer does not allow what the run asks for, or leaves it no time.
            StartupError: it lacks a key or a sandbox.
        """
        return TaskNeeds()


class AdditionOptions(TaskOptions):
    """``addition`` has none."""

    @property
    def prompts(self) -> int:
        """Sums of two digits."""
        return 100


def checked_pattern(pattern: str | None, group: str) -> str | None:
    """Return a regular expression that has a group; ValueError for others. ``group``: what it is for."""
    try:
        if pattern is not None and not re.compile(pattern).groups:
            raise ValueError(f"must have a group for {group}")
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return pattern


class PromptOptions(TaskOptions):
    """Options of every task that asks a question and reads an answer."""

    system: str = ""
    """System prompt; empty: none."""
    chat: Literal["auto"] | bool = "auto"
    """Whether prompts go through the model's chat template; ``auto``: if it has one."""
    template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the chat template, such as ``enable_thinking = false`` for Qwen3; a template ignores those
    that it does not use."""
    answer_from: AnswerSource = "text"
    r"""Part of a completion that is graded: all of its ``text``, its ``last_line`` that is not empty, what
    stands between the last <answer> and </answer> (``tags``), in the last ``\boxed{...}`` (``boxed``), or in
    the first group of ``answer_pattern`` (``pattern``). All but the last leave out what a model thought, up
    to </think> or what other models write for it. ``after_thinking`` is the text after it, and a
    completion that did not end thinking has no answer. A completion without an answer gets 0."""
    answer_pattern: str | None = Field(default=None, max_length=500)
    """Regular expression whose first group is the answer; its last match counts, in all of the text. One that
    takes for ever on a completion costs its group the grader's time limit."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, le=PROMPT_TOKENS)
    """Prompts of more tokens are set aside as ``prompt_too_long``."""

    @field_validator("answer_pattern")
    @classmethod
    def _has_a_group(cls, pattern: str | None) -> str | None:
        return checked_pattern(pattern, "the answer, such as FINAL: (.*)")

    @model_validator(mode="after")
    def _has_the_pattern(self) -> Self:
        if (self.answer_pattern is not None) is not (self.answer_from == "pattern"):
            raise ValueError('answer_from = "pattern" and answer_pattern go together: set both or neither')
        return self

    @field_validator("template_arguments")
    @classmethod
    def _are_the_templates(
        cls, arguments: dict[str, JsonValue], info: ValidationInfo
    ) -> dict[str, JsonValue]:
        if reserved := sorted(RESERVED_ARGUMENTS & arguments.keys()):
            raise ValueError(f"may not have {', '.join(reserved)}, which samplers set")
        if arguments and info.data.get("chat") is False:
            raise ValueError("are for the chat template, which chat = false leaves out")
        return arguments

    @property
    def template_need(self) -> str | None:
        if self.chat is True:
            return "chat = true"
        return "template_arguments are set" if self.template_arguments else None


class QuestionOptions(PromptOptions):
    """Options of tasks whose questions and right answers are columns of the rows."""

    takes_rows = True

    prompt: str = "prompt"
    """Column with the prompt's text, or with its messages. See ``column_of`` for what is inside one."""
    messages: str | None = None
    """Column with the prompt as a list of {"role", "content"} messages, or as JSON of one, instead of
    ``prompt``. Messages may have tool_calls; content parts must be texts."""
    tools: str | None = None
    """Column with the tools that the row's prompt offers, a list of JSON schemas or JSON of one, which the
    chat template writes out; a row where it is null offers none. Unset: as ``template_arguments`` say."""
    answer: str = "answer"
    """Column with the right answer, or with a list of them, any of which is right."""

    @model_validator(mode="after")
    def _has_one_set_of_tools(self) -> Self:
        if self.tools is not None and self.chat is False:
            raise ValueError("tools are for the chat template, which chat = false leaves out")
        if self.tools is not None and "tools" in self.template_arguments:
            raise ValueError("tools and template_arguments.tools are two sets of tools: leave one out")
        return self

    @property
    def columns(self) -> Mapping[str, str]:
        question = {"messages": self.messages} if self.messages else {"prompt": self.prompt}
        return question | ({"tools": self.tools} if self.tools is not None else {})

    @property
    def template_need(self) -> str | None:
        if self.chat is not True and self.tools is not None:
            return "tools are a column of the rows"
        return super().template_need


def options_json(options: Mapping[str, JsonValue]) -> str:
    """Return options as they travel.

    Raises:
        ValueError: they are too large, or hold a number that JSON has not.
    """
    text = json.dumps(options, allow_nan=False)
    if len(text) > TASK_OPTIONS_BYTES:
        raise ValueError(f"take {len(text)} bytes as JSON, at most {TASK_OPTIONS_BYTES} are allowed")
    return text


def checked_options(task: str, options: Mapping[str, JsonValue]) -> TaskOptions | None:
    """Return the options of a built-in task; None for other tasks, whose samplers alone know.

    Raises:
        ValueError: names each wrong option and its rule.
    """
    options_json(options)
    if task not in BUILT_IN:
        return None
    model = options_model(task)
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ValueError(faults_of(error, model, of=f"task {task!r}")) from error


def options_model(task: str) -> type[TaskOptions]:
    """Import the options of a built-in task."""
    model: type[TaskOptions] = pkgutil.resolve_name(BUILT_IN[task].options)
    return model


def faults_of(error: ValidationError, model: type[BaseModel], *, of: str, table: str = "") -> str:
    """Return each wrong key with its rule.

    Args:
        of: Whose keys they are, such as ``task 'jsonl'``.
        table: The table that they stand in.
    """
    said = []
    for fault in error.errors(include_url=False):
        key = ".".join(filter(None, (table, *map(str, fault["loc"]))))
        rule = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            known = [name for name, field in model.model_fields.items() if not field.exclude]
            rule = f"{of} has no such option, known are {', '.join(known) or 'none'}"
        said.append(": ".join(filter(None, (key, rule))))
    return "; ".join(said)
