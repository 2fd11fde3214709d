import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from node.errors import ConfigError
from node.questions.data_row import RowError, column_of
from node.tasks.built_in_tasks import BUILT_IN
from node.tasks.task_options import RESERVED_ARGUMENTS
from sampler.config import VerifierConfig
from sampler.rollouts.task_setup import task_setup
from sampler.tasks.addition import AdditionTask
from sampler.tasks.task import (
    CompletionText,
    Task,
    TaskSetup,
    import_path,
    load_task,
)
from support.graded_texts import setup_of
from support.refusals import misconfigured, naming

MINIMAL: dict[str, dict[str, Any]] = {"reasoning_gym": {"dataset": "leg_counting"}}
"""The options that a task cannot do without."""

ROW = {
    "prompt": "3+4=",
    "answer": 7,
    "chat": [{"role": "user", "content": "3+4"}],
    "query": "3+4",
    "candidates": ["6", "7"],
    "relevance": [0, 1],
    "image": [[0, 255]],
    "label": 1,
}


def made(
    name: str, *, has_chat_template: bool = False, graders: tuple[str, ...] = (), **options: Any
) -> Task:
    """Return a built-in task as a grader process makes it."""
    given = MINIMAL.get(name, {}) | options
    return load_task(setup_of(name, given, allowed_graders=graders, has_chat_template=has_chat_template))


def answered(text: str, finish: str = "end") -> CompletionText:
    return CompletionText(text, len(text), finish)


# Environments of verifiers have tests of their own, which run where that library is installed.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs("reasoning_gym") if name == "reasoning_gym" else ())
        for name in sorted(BUILT_IN.keys() - {"verifiers"})
    ],
)
def test_every_built_in_task_can_be_loaded_and_makes_prompts(name: str) -> None:
    task = made(name)
    assert task.prompts is None or task.prompts >= 1
    assert task.prompt(0, ROW)


def test_addition_covers_every_pair_of_digits_once_and_rewards_the_exact_sum_only() -> None:
    task = AdditionTask()
    prompts = [task.prompt(index, None) for index in range(task.prompts)]
    assert len(set(prompts)) == 100
    assert prompts[37] == "3+7="
    for text in ("10", "1", "100", " 10", "", "10="):
        assert task.grade(37, None, answered(text)) == (text == "10"), text


def test_a_custom_task_is_found_by_its_configured_path() -> None:
    path = import_path("mine", {"mine": "support.unruly_tasks:Printing"}, section="sampler")
    assert load_task(TaskSetup(path, {})).prompt(4, None) == "4="


def test_a_name_off_the_wire_is_never_an_import_path() -> None:
    with misconfigured("addition, jsonl, noise_mask, ranking", key="coordinator.task"):
        import_path("support.unruly_tasks:Printing", {}, section="sampler")


@pytest.mark.parametrize(
    "path", ["nowhere:Task", "support.unruly_tasks:Nobody", "support.unruly_tasks:Broken", ""]
)
def test_a_task_that_cannot_be_made_is_a_configuration_error(path: str) -> None:
    with misconfigured("package.module:ClassName", key="sampler.custom_tasks"):
        load_task(TaskSetup(path, {}))


class Whole:
    """A task of one's own, with options."""

    prompts = None
    max_prompt_tokens = 9

    def __init__(self, *, level: int, names: list[str]) -> None:
        self.level = level

    def prompt(self, index: int, row: Any) -> str:
        return str(row)

    def grade(self, index: int, row: Any, completion: CompletionText) -> tuple[float, dict[str, float]]:
        return 1.0, {"level": self.level, "tokens": completion.tokens}


class Odd:
    prompts = 3

    def prompt(self, index: int, row: Any) -> str:
        return ""

    def grade(self, index: int, text: str) -> float:
        return 0.0


def test_a_custom_task_gets_the_options_as_keyword_arguments() -> None:
    task = load_task(
        setup_of("mine", {"level": 3, "names": ["a"]}, custom_tasks={"mine": f"{__name__}:Whole"})
    )
    assert task.prompt(0, {"n": 1}) == "{'n': 1}"
    assert task.grade(0, {}, answered("abc")) == (1.0, {"level": 3, "tokens": 3})
    with misconfigured("'colour'", key="sampler.custom_tasks"):
        load_task(TaskSetup(f"{__name__}:Whole", {"level": 3, "names": [], "colour": 1}))


def test_a_task_whose_methods_take_other_arguments_is_refused() -> None:
    with misconfigured("prompt(self, index, row)", "grade(self, index, row, ", key="sampler.custom_tasks"):
        load_task(TaskSetup(f"{__name__}:Odd", {}))


def test_the_columns_of_a_row_are_the_options_of_jsonl() -> None:
    assert made("jsonl").prompt(0, ROW) == "3+4="
    assert made("jsonl", system="Add.").prompt(0, ROW) == "Add.\n\n3+4="
    assert made("jsonl", prompt="q").prompt(0, {"q": "?", "answer": 7}) == "?"
    assert made("jsonl", system="Add.", has_chat_template=True).prompt(0, ROW) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "3+4="},
    ]
    assert made("jsonl", messages="chat", has_chat_template=True).prompt(0, ROW) == ROW["chat"]
    assert made("jsonl", messages="chat", chat=False, has_chat_template=True).prompt(0, ROW) == "3+4"
    with naming(RowError, "'q'", "prompt, answer, chat"):
        made("jsonl", prompt="q").prompt(0, ROW)
    with naming(RowError, "'answer'", "number", "text"):
        made("jsonl", prompt="answer").prompt(5, ROW)


NESTED = {"a": {"b": "in"}, "a.b": "own name", "c": {"texts": ["first", "second"]}, "d": "text", "e": None}


def test_a_column_may_be_inside_another() -> None:
    assert column_of(NESTED, "a.b") == "own name"
    assert column_of(NESTED, "c.texts.1") == "second"
    assert [column_of(NESTED, name) for name in ("c.texts", "d", "e")] == [["first", "second"], "text", None]
    for nowhere in ("b", "a.c", "c.texts.2", "c.texts.x", "d.0", "e.f", "a.", "."):
        with naming(KeyError, f"'{nowhere}'", "a, a.b, c, d, e"):
            column_of(NESTED, nowhere)


def test_a_column_may_be_a_key_of_another_and_a_dot_of_its_name() -> None:
    """As many data sets for reinforcement learning have it."""
    row = {
        "prompt": [{"role": "user", "content": "1+1?", "tool_calls": None}],
        "reward_model": {"ground_truth": "2"},
        "extra.answer": "3",
    }
    task = made("jsonl", messages="prompt", answer="reward_model.ground_truth", has_chat_template=True)
    assert task.prompt(0, row) == [{"role": "user", "content": "1+1?"}]
    assert task.grade(0, row, answered("2")) == 1.0
    assert made("jsonl", answer="extra.answer").grade(0, row, answered("3")) == 1.0
    with naming(RowError, "'reward_model.answer'", "prompt, reward_model"):
        made("jsonl", answer="reward_model.answer").grade(0, row, answered("2"))


@pytest.mark.parametrize(
    ("leading", "system"),
    [
        ([], "Add."),
        (["Be brief."], "Add.\n\nBe brief."),
        (["Be brief.", "Be kind."], "Add.\n\nBe brief.\n\nBe kind."),
    ],
)
def test_system_messages_at_the_beginning_are_one(leading: list[str], system: str) -> None:
    """Most templates refuse a second one, or write it out as a turn."""
    turns = [{"role": "user", "content": "1"}, {"role": "system", "content": "late"}]
    row = {"m": [*({"role": "system", "content": text} for text in leading), *turns], "answer": "2"}
    task = made("jsonl", messages="m", system="Add.", has_chat_template=True)
    assert task.prompt(0, row) == [{"role": "system", "content": system}, *turns]


def graded_by_me(row: Any, completion: CompletionText) -> tuple[float, dict[str, float]]:
    return 0.5, {"length": completion.tokens}


def test_a_grader_of_ones_own_is_called_only_where_the_sampler_allows_it(tmp_path: Path) -> None:
    mine = f"{__name__}:graded_by_me"
    assert made("jsonl", grader=mine, graders=(mine,)).grade(0, ROW, answered("ab")) == (0.5, {"length": 2})
    with misconfigured(
        "sampler.allowed_graders", "os:system", key="coordinator.task_options.grader"
    ) as error:
        made("jsonl", grader=mine, graders=("os:system",))
    assert error.value.key == "coordinator.task_options.grader"


NEEDING: dict[str, dict[str, Any]] = {
    "allowed_graders": {"grader": "mine:grade"},
    "run_code": {"grader": "code", "code": {}, "answer": "tests"},
    "judge.url": {
        "grader": "judge",
        "judge": {"model": "wise", "template": "{completion}", "score_key": "score"},
    },
}
"""Setting without which a peer cannot grade -> options."""


@pytest.mark.parametrize("setting", NEEDING)
def test_a_verifier_is_told_what_to_set_in_its_own_section(setting: str, tmp_path: Path) -> None:
    with naming(ConfigError, f"verifier.{setting}"):
        task_setup(VerifierConfig(model_dir=tmp_path), "jsonl", {"prompt": "question", **NEEDING[setting]})


@pytest.mark.parametrize("options", [*NEEDING.values(), {"grader": "math_verify"}])
def test_a_sampler_that_does_not_grade_makes_prompts_without_anything_that_only_graders_need(
    options: dict[str, Any],
) -> None:
    setup = setup_of("jsonl", {"prompt": "question", **options}, grades=False)
    assert (setup.local, setup.served_at) == ({"grades": False}, "")
    task = load_task(setup)
    row = {"question": "2+2=", "answer": "4", "tests": ["assert True"]}
    assert task.prompt(0, row) == "2+2="
    with pytest.raises(RuntimeError):
        task.grade(0, row, CompletionText("4", 1, "end"))


THINKING = {"template_arguments": {"enable_thinking": False}}


def test_without_a_template_auto_does_without_and_with_one_its_arguments_go_to_the_engine() -> None:
    assert made("jsonl", chat="auto").prompt(0, ROW) == "3+4="
    setup = setup_of("jsonl", THINKING, has_chat_template=True)
    assert setup.template_arguments == THINKING["template_arguments"]


@pytest.mark.parametrize(
    ("options", "has_chat_template", "said"),
    [
        ({"colour": 1}, False, ("colour", "'jsonl'")),
        ({"chat": True}, False, ("chat = true",)),
        (THINKING, False, ("template_arguments",)),
        ({**THINKING, "chat": False}, True, ("template_arguments", "chat = false")),
        ({"template_arguments": {"chat_template": "{{ 1 }}"}}, True, ("template_arguments", "chat_template")),
    ],
)
def test_options_that_nothing_here_can_use_are_a_configuration_error(
    options: dict[str, Any], has_chat_template: bool, said: tuple[str, ...]
) -> None:
    with misconfigured(*said, key="coordinator.task_options"):
        made("jsonl", has_chat_template=has_chat_template, **options)


def test_what_samplers_ask_of_a_template_is_not_for_the_coordinator_to_set() -> None:
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    data = {"self", "kwargs", "tools", "documents"}
    assert (own.keys() - data) | {"messages"} == RESERVED_ARGUMENTS


@pytest.mark.parametrize(
    ("name", "package", "options"),
    [("reasoning_gym", "reasoning_gym", {}), ("jsonl", "math_verify", {"grader": "math_verify"})],
)
def test_a_task_whose_package_is_not_installed_here_is_refused_before_any_prompt(
    name: str, package: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with misconfigured(package, key="coordinator.task") as error:
        made(name, **options)
    assert "pip install 'heterorl-node[tasks]'" in error.value.fix


@pytest.mark.needs("reasoning_gym")
def test_reasoning_gym_asks_the_same_questions_everywhere_and_scores_them() -> None:
    import reasoning_gym  # here, as not every machine has it

    options: dict[str, Any] = {"size": 5, "seed": 3, "arguments": {"min_animals": 1, "max_animals": 2}}
    first, second = (made("reasoning_gym", **options) for _ in range(2))
    assert first.prompts == 5
    assert [first.prompt(n, None) for n in range(5)] == [second.prompt(n, None) for n in range(5)]
    arguments = options["arguments"]
    right = reasoning_gym.create_dataset("leg_counting", size=5, seed=3, **arguments)[2]["answer"]
    assert first.grade(2, None, answered(f"<answer>{right}</answer>")) == 1.0
    assert first.grade(2, None, answered(f"<answer>{right}1</answer>")) != 1.0
    assert first.grade(2, None, answered(right)) == 0.0


@pytest.mark.needs("reasoning_gym")
@pytest.mark.parametrize(
    "options", [{"dataset": "nothing"}, {"arguments": {"colour": 1}}, {"arguments": {"min_animals": 0}}]
)
def test_a_generator_that_cannot_be_made_says_why(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"nothing|colour|min_animals"):
        made("reasoning_gym", **options)


@pytest.mark.parametrize(
    ("options", "allowed", "error", "names"),
    [
        ({"environment": "a-game"}, ["mine:grade"], ConfigError, ("a_game:load_environment", "mine:grade")),
        ({"environment": "a-game"}, ["a_game:load_environment"], ConfigError, ("heterorl-node[verifiers]",)),
        ({"environment": "os.path"}, ["os.path:load_environment"], ConfigError, ("environment",)),
    ],
    ids=["not allowed", "not installed", "no name of one"],
)
def test_an_environment_is_code_that_the_sampler_has_to_allow_and_have(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    allowed: list[str],
    error: type[ConfigError],
    names: tuple[str, ...],
) -> None:
    monkeypatch.setattr("node.system.extras.find_spec", lambda package: None)
    with naming(error, *names):
        setup_of("verifiers", options, allowed_graders=allowed, has_chat_template=True)
