"""Options of the task ``jsonl``: columns of the rows, and the grader with its own table of options."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from node.grading.grader import AnswerGrader
from node.grading.registry import built_in, check_name, grader_class, installed
from node.questions.question import question_of, tools_of
from node.tasks.task_options import QuestionOptions, TaskNeeds, faults_of

DEFAULT_GRADER = "exact"


class JsonlOptions(QuestionOptions):
    """Options of ``jsonl``: prompts and answers are columns of the rows."""

    prompts_alone = True

    grader: Annotated[str, AfterValidator(check_name)] = DEFAULT_GRADER
    """The grader that compares answers with the right ones, such as ``exact``: its name, where it is of this
    package or of one that is installed; or ``package.module:function``, which is called with row and
    completion. Samplers must have installed those that are not of this package, and name them in
    ``sampler.allowed_graders``."""
    grader_options: BaseModel | None = Field(default=None, exclude=True, repr=False)
    """Options of the grader, from the table that bears its name: it is not a key itself."""

    @model_validator(mode="before")
    @classmethod
    def _reads_the_graders_table(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "grader_options" in given:
            raise ValueError("a grader's options are a table that bears its name")
        name = given.get("grader", DEFAULT_GRADER)
        names = {*built_in(), *installed()} - cls.model_fields.keys()
        tables = {key for key, value in given.items() if key in names and value is not None}
        try:
            model = grader_class(check_name(name)).table
        except (TypeError, ValueError):
            return given  # which the field's own check refuses
        allowed = set() if model is None else {name}
        needed = allowed if model is not None and _has_required(model) else set()
        if wrong := sorted((tables - allowed) | (needed - tables)):
            raise ValueError(
                f"grader = {wrong[0]!r} and the table {wrong[0]} go together: set both or neither"
            )
        rest = {key: value for key, value in given.items() if key not in names}
        if model is None:
            return rest
        try:
            return {**rest, "grader_options": model.model_validate(given[name] if name in tables else {})}
        except ValidationError as error:
            raise ValueError(faults_of(error, model, of="task 'jsonl'", table=name)) from error

    @cached_property
    def made_grader(self) -> AnswerGrader:
        """The grader with its options."""
        return grader_class(self.grader)(self.grader, self, self.grader_options)

    @property
    def columns(self) -> Mapping[str, str]:
        answer = {"answer": self.answer} if self.made_grader.reads_answer else {}
        return {**super().columns, **answer}

    @property
    def package(self) -> str | None:
        return grader_class(self.grader).package

    @property
    def named_code(self) -> tuple[str, str] | None:
        return None if self.grader in built_in() else ("grader", self.grader)

    @property
    def said_of_rows(self) -> str:
        if "answer" in self.columns:
            return f"each can be a prompt and has an answer for the grader {self.grader}"
        if ":" in self.grader:
            return f"each can be a prompt; what {self.grader} needs of them is its own"
        return "each can be a prompt"

    def check_row(self, row: Mapping[str, Any]) -> None:
        question_of(row, self)
        tools_of(row, self)
        self.made_grader.check_row(row)

    def needs_of(self, peer: Any, *, group_size: int) -> TaskNeeds:
        return self.made_grader.needs_of(peer, group_size=group_size)


def _has_required(model: type[BaseModel]) -> bool:
    return any(field.is_required() for field in model.model_fields.values())
