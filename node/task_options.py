"""The options of the built-in tasks, checked at the coordinator before anything starts, and by samplers.

Options are data: the coordinator sends them to samplers as JSON. What a task does with them is in
``sampler.tasks``; the options of a custom task are its own business.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from node.limits import PROMPT_TOKENS, TASK_OPTIONS_BYTES

IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

GRADERS: Final = ("exact", "contains", "number", "math_verify", "judge", "code")

AnswerSource: TypeAlias = Literal["text", "last_line", "tags", "after_thinking", "boxed", "pattern"]
"""Where the answer stands in a completion; see ``PromptOptions.answer_from``."""

JUDGE_FIELD: Final = re.compile(r"\{(question|answer|completion)\}")


def _check_grader(grader: str) -> str:
    if grader not in GRADERS and not IMPORT_PATH.fullmatch(grader):
        raise ValueError(f"must be {', '.join(GRADERS)}, or package.module:function of every sampler")
    return grader


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


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row, or what is inside one: ``reward_model.ground_truth``, ``answers.text.0``.

    A column whose own name has dots comes first. A text that holds JSON is looked into as if it were its
    value. Names may be composed of other code points than in the file: they are compared in NFC.

    Raises:
        KeyError: the row has no such column.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str):
            value = _json_in(value)
        try:
            value = value[int(part)] if isinstance(value, list) else _member(value, part)
        except (LookupError, TypeError, ValueError) as error:
            raise KeyError(f"the row has no column {name!r}, it has {', '.join(row)}") from error
    return value


def _member(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} has no members")
    if name in value:
        return value[name]
    wanted = unicodedata.normalize("NFC", name)
    return value[{unicodedata.normalize("NFC", key): key for key in value}[wanted]]


def _json_in(text: str) -> Any:
    """Return the object or list that a text holds as JSON; None: it holds none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class TaskOptions(BaseModel):
    """Options of a built-in task; without any, as here, it has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    takes_rows: ClassVar[bool] = False
    """Whether its prompts are the rows of ``[coordinator.data]``."""

    extra: ClassVar[str] = "tasks"
    """The extra that installs ``package``."""

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


class AdditionOptions(TaskOptions):
    """``addition`` has none."""

    @property
    def prompts(self) -> int:
        """Sums of two digits."""
        return 100


def _checked_pattern(pattern: str | None, group: str) -> str | None:
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
        return _checked_pattern(pattern, "the answer, such as FINAL: (.*)")

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


class JudgeOptions(BaseModel):
    """Question to a model about each completion; each sampler's configuration says where that model is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = Field(min_length=1, max_length=200)
    """Its name. Samplers have it in ``sampler.judge.models``, or refuse the run."""
    template: str = Field(min_length=1)
    """The question: {question}, {answer} and {completion} stand for the prompt, the right answer and what
    the policy wrote, which is put between two lines that the policy cannot know."""
    system: str = ""
    """Its system prompt; a warning against instructions in the completion is appended."""
    score_pattern: str | None = Field(default=None, max_length=500)
    """Regular expression whose first group is the score; its last match counts. A group that is part of a
    number stands for all of it: ``Score: ([0-9]+)`` reads 7.5 of ``Score: 7.5``."""
    score_key: str | None = Field(default=None, min_length=1, max_length=100)
    """Key of the score in the JSON object that the judge answers with, instead of ``score_pattern``."""
    lowest: float = 0.0
    """The score that is worth reward 0."""
    highest: float = 10.0
    """The score that is worth reward 1. An answer beyond the scale is no answer."""
    max_tokens: int = Field(default=512, ge=1, le=8192)
    """Limit of the judge's answer, which is drawn at temperature 0."""

    @field_validator("template")
    @classmethod
    def _has_the_completion(cls, template: str) -> str:
        if "{completion}" not in template:
            raise ValueError("must have {completion}, and may have {question} and {answer}")
        return template

    @field_validator("score_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        return _checked_pattern(pattern, "the score, such as Score: ([0-9.]+)")

    @model_validator(mode="after")
    def _has_a_scale(self) -> Self:
        if (self.score_pattern is None) is (self.score_key is None):
            raise ValueError("set either score_pattern or score_key")
        if not self.lowest < self.highest:
            raise ValueError(f"lowest = {self.lowest} must be below highest = {self.highest}")
        return self


class CodeOptions(BaseModel):
    """How a program that the policy wrote is tested, in a sandbox, where ``sampler.run_code`` allows it.

    The program is the completion's last fenced block, or all of it; the tests are the column ``answer``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tests: Literal["asserts", "stdin"] = "asserts"
    """``asserts``: Python source with asserts, or a list of them (MBPP, HumanEval); each is a test.
    ``stdin``: inputs and outputs (APPS, LiveCodeBench), each pair a run of the program."""
    setup: str | None = None
    """Column with source that comes before the asserts, such as imports."""
    entry_point: str | None = None
    """Column with the name of the function that the asserts of a function ``check`` are about (HumanEval)."""
    prefix: str | None = None
    """Column with the source that the completion continues, such as the prompt itself (HumanEval)."""
    reward: Literal["share", "all"] = "share"
    """The share of the tests that passed, or 1 if all did, else 0."""
    time_limit_s: int = Field(default=2, ge=1, le=60)
    """CPU time of a run. After the first that takes longer, the others count as failed. All together get
    twice as much of wall time, and a second a run to start."""
    memory_limit_bytes: int = Field(default=512 << 20, ge=64 << 20, le=16 << 30)
    """Address space of the program."""
    most_tests: int = Field(default=10, ge=1, le=256)
    """Pairs of input and output that are run, the first ones. Asserts all are."""


TABLES: Final[Mapping[str, type[BaseModel]]] = {"judge": JudgeOptions, "code": CodeOptions}
"""Option that is a table -> its keys."""


class JsonlOptions(PromptOptions):
    """Options of ``jsonl``: prompts and answers are columns of the rows."""

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
    grader: Annotated[str, AfterValidator(_check_grader)] = "exact"
    """``exact`` and ``contains`` compare text, ``number`` the number that is marked or the last,
    ``math_verify`` what formulas are worth; ``judge`` asks a model; ``code`` runs tests.
    ``package.module:function`` is called with row and completion, where samplers have it in
    ``sampler.allowed_graders``."""
    judge: JudgeOptions | None = None
    """Options of the grader ``judge``: a table [coordinator.task_options.judge]."""

    code: CodeOptions | None = None
    """Options of the grader ``code``: a table [coordinator.task_options.code]."""

    @model_validator(mode="after")
    def _has_the_graders_options(self) -> Self:
        if self.tools is not None and self.chat is False:
            raise ValueError("tools are for the chat template, which chat = false leaves out")
        if self.tools is not None and "tools" in self.template_arguments:
            raise ValueError("tools and template_arguments.tools are two sets of tools: leave one out")
        for name in TABLES:
            if (getattr(self, name) is not None) is not (self.grader == name):
                raise ValueError(f"grader = {name!r} and the table {name} go together: set both or neither")
        return self

    @property
    def columns(self) -> Mapping[str, str]:
        question = {"messages": self.messages} if self.messages else {"prompt": self.prompt}
        if self.tools is not None:
            question["tools"] = self.tools
        is_answered = self.grader in GRADERS and (self.judge is None or "{answer}" in self.judge.template)
        return question | ({"answer": self.answer} if is_answered else {})

    @property
    def package(self) -> str | None:
        return "math_verify" if self.grader == "math_verify" else None


class ReasoningGymOptions(PromptOptions):
    """Options of ``reasoning_gym``: questions that a generator of that package makes and scores."""

    dataset: str = Field(pattern=r"^[a-z0-9_]+$")
    """Name of the generator, such as ``leg_counting``."""
    size: int = Field(default=1000, ge=1, le=1 << 31)
    """Number of questions."""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    """Seed of the questions; the same everywhere."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """The generator's own arguments."""
    answer_from: AnswerSource = "tags"
    """As for every task that asks a question."""

    @property
    def package(self) -> str | None:
        return "reasoning_gym"

    @property
    def prompts(self) -> int:
        return self.size


class VerifiersOptions(TaskOptions):
    """Options of ``verifiers``: prompts, turns, tools and rewards of an environment of that library."""

    extra = "verifiers"

    environment: str = Field(pattern=r"^([a-z0-9-]+/)?[a-z][a-z0-9_-]*$")
    """Its id, such as ``wordle``. Samplers have it installed, and in ``sampler.allowed_graders`` as
    ``wordle:load_environment``."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of its ``load_environment``."""
    template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """As of ``jsonl``; an environment's tools are among them already."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, le=PROMPT_TOKENS)
    """Prompts of more tokens are set aside as ``prompt_too_long``."""

    @property
    def package(self) -> str | None:
        return "verifiers"

    @property
    def loader(self) -> str:
        """The function that makes the environment."""
        return f"{self.environment.split('/')[-1].replace('-', '_')}:load_environment"


class RankingOptions(TaskOptions):
    """Options of ``ranking``: queries, candidates and their relevance are columns of the rows."""

    takes_rows = True

    query: str = "query"
    """Column with the query's text. See ``column_of`` for what is inside one."""
    candidates: str = "candidates"
    """Column with the candidates, a list of texts."""
    relevance: str = "relevance"
    """Column with a number for each candidate, at least 0; some must be above."""
    metric: Literal["ndcg", "mrr", "recall"] = "ndcg"
    """The reward: normalised discounted cumulative gain, the inverse rank of the first relevant candidate, or
    the share of the relevant ones among the first ``k``."""
    k: int = Field(default=10, ge=1, le=4096)
    """Positions that count."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, le=PROMPT_TOKENS)
    """Queries with candidates of more tokens together are set aside as ``prompt_too_long``."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {"query": self.query, "candidates": self.candidates, "relevance": self.relevance}


class NoiseMaskOptions(TaskOptions):
    """Options of ``noise_mask``: images and their labels are columns of the rows."""

    takes_rows = True

    image: str = "image"
    """Column with the image: lists of rows of pixels, 0 to 255, each a number or one for each channel; or
    their bytes in this order as base64. See ``column_of`` for what is inside one."""
    label: str = "label"
    """Column with the number of the image's class, from 0."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {"image": self.image, "label": self.label}


BUILT_IN: Final[Mapping[str, type[TaskOptions]]] = {
    "addition": AdditionOptions,
    "jsonl": JsonlOptions,
    "noise_mask": NoiseMaskOptions,
    "ranking": RankingOptions,
    "reasoning_gym": ReasoningGymOptions,
    "verifiers": VerifiersOptions,
}
"""Task name -> its options."""


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
    if (model := BUILT_IN.get(task)) is None:
        return None
    try:
        return model.model_validate(options)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise ValueError("; ".join(_fault(dict(fault), task, model) for fault in faults)) from error


def _fault(fault: Mapping[str, Any], task: str, model: type[TaskOptions]) -> str:
    key = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        fields = TABLES[fault["loc"][0]].model_fields if len(fault["loc"]) > 1 else model.model_fields
        return f"{key}: task {task!r} has no such option, known are {', '.join(fields) or 'none'}"
    return ": ".join(filter(None, (key, fault["msg"].removeprefix("Value error, "))))
