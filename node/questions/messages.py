"""Messages of a prompt, in the form in which every chat template can read them.

    content null or missing beside tool_calls  -> ""
    content of one text part, or of several    -> its text; a list of {"type": "text", "text": ...}
    arguments of a tool call as a JSON text    -> the object, which templates write out themselves
    other keys                                 -> as they are, without what is null in them

Refuses what no template can be given: other parts than texts, messages without a role or a content, and the
layout of ShareGPT. Whether the model's own template takes the messages is found where it is rendered.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from node.questions.json_values import has_whole_characters, kind_of_value, value_in_text, without_nulls

_TEXT_PARTS: Final = (None, "text", "input_text", "output_text")
"""Types of content parts that hold a text, of OpenAI's two interfaces; some data sets leave it out."""

_IS_TEXT: Final = "is a text, not a list of messages; name a column of texts with the option prompt"


class MessagesError(ValueError):
    """A value that is not the messages of a prompt.

    Attributes:
        rule: the fault, without values, such as ``has a message without a role``.
        value: what is at fault.
    """

    def __init__(self, rule: str, value: object = None) -> None:
        super().__init__(rule if value is None else f"{rule}: {value!r:.100}")
        self.rule = rule
        self.value = value


def messages_of(value: object) -> list[dict[str, Any]]:
    """Return a list of messages, each with ``role``, ``content`` and what else it has.

    A content is a text, or a list of several text parts: some templates write parts out themselves.

    Raises:
        MessagesError: it is something else.
    """
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list):
        raise MessagesError("is an object that holds messages; name them too, as in body.messages", value)
    if not isinstance(value, list | tuple):
        raise MessagesError(f"is {kind_of_value(value)}, not a list of messages", value)
    if not value:
        raise MessagesError("is an empty list, with no message in it")
    messages = [_message(each) for each in value]
    if not any(content_text(message).strip() or message.get("tool_calls") for message in messages):
        raise MessagesError("has no message that says anything", value)
    if not has_whole_characters(json.dumps(messages, ensure_ascii=False)):
        raise MessagesError("has half of a surrogate pair in it, which is not a character", value)
    return messages


def content_text(message: Mapping[str, Any]) -> str:
    """Return a message's content as one text, with its parts a line each."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def messages_in_text(text: str) -> list[dict[str, Any]]:
    """Return the messages that a JSON text holds; MessagesError if it holds none."""
    try:
        value = value_in_text(text)
    except ValueError:
        if text.lstrip().startswith(("[{'", "{'", "array(")):
            rule = "is a list as Python prints it, not JSON; write the column with json.dumps"
        else:
            rule = _IS_TEXT
        raise MessagesError(rule, text) from None
    if not isinstance(value, list | Mapping):
        raise MessagesError(_IS_TEXT, text)
    return messages_of(value)


def holds_messages(text: str) -> bool:
    """Whether a text is messages written as JSON, which no model should read in this form."""
    if not text.lstrip().startswith("[") or not ('"role"' in text or '"from"' in text):
        return False
    try:
        value = value_in_text(text)
    except ValueError:
        return False
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or _is_sharegpt(value))


def _is_sharegpt(message: Mapping[str, Any]) -> bool:
    return "role" not in message and {"from", "value"} <= message.keys()


def _message(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise MessagesError(
            f"has a message that is {kind_of_value(given)}, not an object with role and content", given
        )
    message: dict[str, Any] = without_nulls(given)
    if _is_sharegpt(message):
        raise MessagesError(
            "has messages of from and value, as ShareGPT has them; rename these keys to role and content, "
            "and human to user, gpt to assistant",
            given,
        )
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise MessagesError("has a message without a role, which is a text such as user", given)
    if "function_call" in message:
        raise MessagesError("has a message with function_call, which is now written as tool_calls", given)
    calls = _tool_calls(message.pop("tool_calls", None), given)
    if (content := message.pop("content", None)) is None and not calls:
        what = "content null" if "content" in given else "no content"
        raise MessagesError(f"has a message with {what} and no tool_calls", given)
    rest = {key: value for key, value in message.items() if key != "role"}
    return {"role": role, "content": _content(content), **rest, **({"tool_calls": calls} if calls else {})}


def _content(content: object) -> str | list[dict[str, str]]:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() | tuple():
            texts = list(map(_part, content))
            if len(texts) > 1:
                return [{"type": "text", "text": text} for text in texts]
            return "".join(texts)
        case _:
            raise MessagesError(
                f"has a message whose content is {kind_of_value(content)}, not a text or parts", content
            )


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else kind_of_value(part)
    raise MessagesError(f"has a content part of type {kind!r}; only texts are supported", part)


def _tool_calls(calls: object, message: object) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        try:
            calls = without_nulls(value_in_text(calls)) if calls.strip() else None
        except ValueError:
            raise MessagesError("has tool_calls that are a text, and not JSON", message) from None
    if calls is None or calls == []:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise MessagesError("has tool_calls that are not a list of objects", message)
    return [_tool_call(call, message) for call in calls]


def _tool_call(call: Mapping[str, Any], message: object) -> dict[str, Any]:
    wrapped = isinstance(call.get("function"), Mapping)
    function = dict(call["function"] if wrapped else call)
    if not isinstance(function.get("name"), str):
        raise MessagesError("has a tool call without the name of a function", message)
    if isinstance(arguments := function.get("arguments"), str):
        try:
            function["arguments"] = value_in_text(arguments) if arguments.strip() else {}
        except ValueError:
            raise MessagesError("has a tool call whose arguments are a text, and not JSON", message) from None
    return {**call, "function": function} if wrapped else function
