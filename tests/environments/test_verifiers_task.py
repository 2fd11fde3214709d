"""Environments of the library verifiers, with the library itself."""

from collections.abc import Sequence
from typing import Any

import pytest

from sampler.tasks.environments.verifiers_task import VerifiersTask
from sampler.tasks.task import CompletionText, Message, Task, TaskSetup, load_task
from support.graded_texts import setup_of

OPTIONS = {"environment": "number-environments"}
LOADER = "number_environments:load_environment"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("tests/support")


def made(kind: str, **arguments: Any) -> VerifiersTask:
    return VerifiersTask(**OPTIONS, arguments={"kind": kind, **arguments})


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def graded(task: VerifiersTask, conversation: Sequence[Message], *, index: int, finish: str = "end") -> Any:
    text = conversation[-1]["content"]
    return task.grade(index, None, CompletionText(text, 1, finish, tuple(conversation)))


def test_the_environment_is_loaded_where_the_sampler_allows_it() -> None:
    setup = setup_of("verifiers", OPTIONS, allowed_graders=[LOADER], has_chat_template=True)
    assert isinstance(setup, TaskSetup)
    task: Task = load_task(setup)
    assert task.prompts == 5


def test_a_game_goes_on_until_its_environment_ends_it() -> None:
    task = made("game", max_turns=4)
    assert (task.prompts, task.max_turns, task.is_stateful) == (5, 4, True)
    assert task.prompt(3, None) == [
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "find 3"},
    ]
    conversation = [said("7")]
    for count, guess in enumerate(("8", "3"), 1):
        reply = task.reply(3, None, conversation)
        assert reply == [{"role": "user", "content": f"wrong {count}"}]
        conversation += [*reply, said(guess)]
    assert task.reply(3, None, conversation) is None
    reward, metrics = graded(task, conversation, index=3)
    assert reward == pytest.approx(1 / 3)
    assert metrics == {"_found": pytest.approx(1 / 3), "num_turns": 3.0}


def test_equal_conversations_have_a_rollout_each() -> None:
    task = made("game")
    first, second = [said("7")], [said("7")]
    first += [*(task.reply(1, None, first) or ()), said("1")]
    second += [*(task.reply(1, None, second) or ()), said("7")]
    assert second[1] == {"role": "user", "content": "wrong 1"}
    assert task.reply(1, None, first) is None
    second += [*(task.reply(1, None, second) or ()), said("1")]
    assert task.reply(1, None, second) is None
    assert graded(task, first, index=1)[0] == pytest.approx(1 / 2)
    assert graded(task, second, index=1)[0] == pytest.approx(1 / 3)


def test_a_conversation_that_is_cut_is_graded_as_far_as_it_came() -> None:
    task = made("game")
    cut = [said("7")]
    assert graded(task, cut, index=2, finish="length")[0] == 0.0
    without_room = [said("2 2")]
    assert task.reply(2, None, without_room)
    assert graded(task, without_room, index=2, finish="length")[0] == 0.0
    last = [said("7")]
    last += [*(task.reply(2, None, last) or ()), said("2")]
    reward, metrics = graded(task, last, index=2)
    assert (reward, metrics["num_turns"]) == (0.5, 2.0)


def test_a_tool_is_called_and_told_to_the_template() -> None:
    task = made("tool")
    (tool,) = task.template_arguments["tools"]
    assert (tool["type"], tool["function"]["name"]) == ("function", "add")
    call = 'So <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    conversation = [said(call)]
    reply = task.reply(3, None, conversation)
    assert reply == [{"role": "tool", "content": "3"}]
    conversation += [*reply, said("3")]
    assert task.reply(3, None, conversation) is None
    reward, metrics = graded(task, conversation, index=3)
    assert reward == 1.0
    assert metrics["add_calls"] == 1.0
    assert task.reply(3, None, [said("<tool_call>{never closed</tool_call>")]) is None


def test_a_single_turn_is_graded_by_the_rubric() -> None:
    task = made("single")
    assert task.max_turns == 1
    assert task.grade(4, None, CompletionText("4", 1, "end"))[0] == 1.0
    assert task.grade(4, None, CompletionText("5", 1, "end"))[0] == 0.0


def test_an_environment_that_rewrites_what_was_said_is_refused() -> None:
    with pytest.raises(ValueError, match="rewrites what was said"):
        made("rewriting").reply(1, None, [said("1")])
