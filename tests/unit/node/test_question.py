"""Questions of rows: texts and messages as public data sets have them, and what no template can be given."""

import json
from typing import Any

import pytest

from node.questions.data_row import RowError, column_of
from node.questions.messages import messages_of
from node.questions.question import question_of, tools_of
from node.tasks.task_options import QuestionOptions
from support.refusals import naming

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": ["x"]}}}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def asked(value: Any, **options: Any) -> Any:
    return question_of({"m": value}, QuestionOptions(messages="m", **options))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (USER, USER),
        ({**USER, "weight": 1, "train": False}, {**USER, "weight": 1, "train": False}),
        # Arrow gives every message the keys of every other one.
        ({**USER, "name": None, "tool_calls": None}, USER),
        ({"role": "user", "content": [{"type": "text", "text": "hi", "image_url": None}]}, USER),
        (
            {"role": "user", "content": ["a", {"text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        ({"role": "user", "content": ["a"]}, {"role": "user", "content": "a"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": None,
                        "function": {"name": "search", "arguments": {"q": ["x"], "city": None}},
                    }
                ],
            },
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        # OpenAI's arguments are a text; a template would write it out with quotes around.
        (
            {
                "role": "assistant",
                "tool_calls": [
                    {"type": "function", "function": {"name": "search", "arguments": '{"q": ["x"]}'}}
                ],
            },
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        ({**USER, "tool_calls": []}, USER),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": ""}]},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]},
        ),
    ],
)
def test_a_message_is_read_as_any_template_can_be_given_it(given: Any, read: Any) -> None:
    follows = [USER, given, {"role": "tool", "content": "42"}]
    assert asked(follows)[1] == read
    assert asked(json.dumps(follows))[1] == read


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, "is null, not a list of messages"),
        (5, "is a number, not a list of messages"),
        ("hi", "is a text, not a list of messages; name a column of texts with the option prompt"),
        ('"hi"', "is a text, not a list of messages"),
        (str([USER]), "is a list as Python prints it, not JSON"),
        ([], "is an empty list"),
        ("[]", "is an empty list"),
        ({"messages": [USER]}, "is an object that holds messages; name them too"),
        (json.dumps({"messages": [USER]}), "is an object that holds messages; name them too"),
        ([USER, None], "has a message that is null"),
        (["hi"], "has a message that is a text, not an object with role and content"),
        ([{"from": "human", "value": "hi"}], "as ShareGPT has them; rename these keys to role and content"),
        ([{"content": "hi"}], "has a message without a role"),
        ([{"role": 1, "content": "hi"}], "has a message without a role"),
        ([{"role": "user", "content": None}], "has a message with content null and no tool_calls"),
        ([{"role": "user"}], "has a message with no content and no tool_calls"),
        ([{"role": "user", "content": 5}], "whose content is a number, not a text or parts"),
        ([{"role": "user", "content": " "}], "has no message that says anything"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "has a content part of type 'image_url'; only texts are supported",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}],
            "has a tool call whose arguments are a text, and not JSON",
        ),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {}}]}], "without the name of a function"),
        ([USER, {"role": "assistant", "tool_calls": [1]}], "has tool_calls that are not a list of objects"),
        ([USER, {"role": "assistant", "function_call": {"name": "f"}}], "now written as tool_calls"),
        ([{"role": "user", "content": "\ud800"}], "has half of a surrogate pair"),
    ],
)
def test_what_is_no_messages_is_the_rows_fault_and_says_why(value: Any, rule: str) -> None:
    with naming(RowError, "'m'") as error:
        asked(value)
    assert rule in str(error.value)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, "is null, not a text"),
        (7, "is a number, not a text"),
        ("", "is empty"),
        (" \n", "is empty"),
        (["a", "b"], "is a list, not a text"),
        ({"text": "a"}, "is an object, not a text"),
        ("\ud800", "has half of a surrogate pair"),
        (json.dumps([USER]), "is a text that holds messages as JSON; write messages = 'q' instead of prompt"),
        (json.dumps([{"from": "human", "value": "x"}]), "is a text that holds messages as JSON"),
        ([], "is an empty list"),
    ],
)
def test_a_prompt_that_is_none_is_the_rows_fault(value: Any, rule: str) -> None:
    with naming(RowError, "'q'") as error:
        question_of({"q": value}, QuestionOptions(prompt="q"))
    assert rule in str(error.value)


@pytest.mark.parametrize(
    "value", ["hi", "[1, 2]", "[{'role'", '["role"]', '[{"role": "user"}]', "\U0001f600", [USER]]
)
def test_a_prompt_is_a_text_or_messages(value: Any) -> None:
    assert question_of({"q": value}, QuestionOptions(prompt="q")) == value


def test_tool_calls_need_a_template() -> None:
    with naming(RowError, "'m'", "chat"):
        asked([USER, {"role": "assistant", "tool_calls": [CALL]}], chat=False)


@pytest.mark.parametrize(
    ("value", "tools"),
    [
        (None, []),
        ("", []),
        ([], []),
        ([TOOL], [TOOL]),
        (json.dumps([TOOL]), [TOOL]),
        ([json.dumps(TOOL)], [TOOL]),
        ([{**TOOL, "strict": None}], [TOOL]),
        ([{"name": "f", "enum": ["a", None]}], [{"name": "f", "enum": ["a", None]}]),
    ],
)
def test_a_row_has_tools_of_its_own(value: Any, tools: Any) -> None:
    assert tools_of({"t": value}, QuestionOptions(tools="t")) == tools


@pytest.mark.parametrize("value", ["search", 5, [5], {"name": "f"}, ["search"], [{"description": "x"}]])
def test_tools_that_are_none_are_the_rows_fault(value: Any) -> None:
    with naming(RowError, "'t'"):
        tools_of({"t": value}, QuestionOptions(tools="t"))


def test_values_that_are_nested_too_deeply_are_the_rows_fault() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with naming(RowError, "'m'"):
        asked([{**USER, "extra": deep}])


def test_columns_are_found_in_json_texts_and_by_nfc() -> None:
    row = {"info": '{"answer": {"v": [1, 2]}}', "re\u0301ponse": "x", "text": "not {json"}
    assert column_of(row, "info.answer.v.1") == 2
    assert column_of(row, "r\u00e9ponse") == "x"
    for name in ("text.a", "info.b", "info.answer.v.7"):
        with pytest.raises(KeyError):
            column_of(row, name)


def test_what_is_read_is_read_the_same_again() -> None:
    once = messages_of([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert messages_of(once) == once
