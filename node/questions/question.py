"""The question of a row: the text or the messages that it asks the model, and the tools it offers."""

from collections.abc import Mapping
from typing import Any

from node.questions.data_row import RowError, found_in
from node.questions.json_values import has_whole_characters, kind_of_value, value_in_text, without_nulls
from node.questions.messages import MessagesError, holds_messages, messages_in_text, messages_of
from node.tasks.task_options import QuestionOptions

Message = dict[str, Any]


def question_of(row: Mapping[str, Any], options: QuestionOptions) -> str | list[Message]:
    """Return what a row asks: a text, or messages for the model's chat template.

    The column that ``messages`` names holds messages, also as JSON in a text. One that ``prompt`` names holds
    a text, or a list of messages; messages in a text are refused there, since nobody wants the model to read
    their JSON.

    Raises:
        RowError: the row can never be a prompt.
    """
    name = options.messages or options.prompt
    value = found_in(row, name)
    try:
        if not isinstance(value, str):
            return _messages(value, name, options)
        if options.messages is not None:
            return _messages(messages_in_text(value), name, options)
    except MessagesError as error:
        raise RowError(name, error.rule, value=error.value) from error
    except RecursionError as error:
        raise RowError(name, "is nested too deeply") from error
    if not value.strip():
        raise RowError(name, "is empty")
    if holds_messages(value):
        raise RowError(
            name,
            f"is a text that holds messages as JSON; write messages = {name!r} instead of prompt",
            value=value,
        )
    if not has_whole_characters(value):
        raise RowError(name, "has half of a surrogate pair in it, which is not a character", value=value)
    return value


def tools_of(row: Mapping[str, Any], options: QuestionOptions) -> list[Message]:
    """Return the tools that a row offers the model, for its chat template; none where the column is null.

    Raises:
        RowError: the column that ``tools`` names holds something else.
    """
    if options.tools is None:
        return []
    value = found_in(row, options.tools)
    try:
        if isinstance(value, str):
            value = value_in_text(value) if value.strip() else None
        if value is None:
            return []
        given = [value_in_text(each) if isinstance(each, str) else each for each in value]
        tools: list[Message] = without_nulls(given)
    except (ValueError, TypeError) as error:
        raise RowError(options.tools, "is not a list of tools, nor JSON of one", value=value) from error
    except RecursionError as error:
        raise RowError(options.tools, "is nested too deeply") from error
    if not all(isinstance(tool, Mapping) and ("name" in tool or "function" in tool) for tool in tools):
        raise RowError(options.tools, "has a tool that is not an object with a function in it", value=value)
    return tools


def _messages(value: object, name: str, options: QuestionOptions) -> list[Message]:
    """Return messages; where the prompt is not for a template, only what can be written without one."""
    if options.messages is None and not _may_be_messages(value):
        raise RowError(name, f"is {kind_of_value(value)}, not a text", value=value)
    messages = messages_of(value)
    if options.chat is False and any("tool_calls" in message for message in messages):
        raise RowError(name, "has tool calls, which only a chat template can write, and chat = false")
    return messages


def _may_be_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
