"""The chat template of a model: messages to the text that the policy goes on from, and what ends its turn.

    prompt          what the template writes up to where the assistant answers
    opened answer   where the last message is the assistant's: up to the end of what it says
    reply           what the template writes after the assistant's last message, up to where it answers again

A mark stands in the messages where the text is cut, so that no template needs to be understood. Templates
that write no beginning of an answer when asked for one are given an answer that is only the mark.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from node.errors import Reason, RefusedError
from sampler.engines.text.template_process import TemplateFailedError, TemplateProcess

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

_TURN: Final = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for what the policy wrote."""
_HERE: Final = "\N{OBJECT REPLACEMENT CHARACTER}here\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands where the policy goes on."""

_QUESTION: Final = {"role": "user", "content": "a"}
_ANSWER: Final = {"role": "assistant", "content": _TURN}

_SHOWN: Final = 100
"""Characters of a template's text in a message."""


class ChatTemplate:
    """For any thread.

    Attributes:
        turn_end: What it writes after the assistant's message, spaces aside; None: not known.
    """

    def __init__(self, tokenizer: Any, process: TemplateProcess, *, path: str) -> None:
        """Try the template of a transformers tokenizer.

        Args:
            path: of the file that it is in, for messages.
        """
        self._tokenizer = tokenizer
        self._path = path
        self._process = process
        self._reads_parts: bool | None = None
        """Whether it writes the texts of content parts; None: not tried yet."""
        self._writes_calls: dict[bool, bool] = {}
        """Prompts have tools -> whether calls of them are written; what is missing was not tried yet."""
        self._has_opening = True
        """Whether it writes the beginning of an answer when asked for one, if there is one."""
        self.turn_end: str | None = None
        tried = "a question"
        try:
            asked, opened = (self._rendered([_QUESTION], {}, opens=opens) for opens in (False, True))
            tried = "a question and its answer"
            self._try_answer(asked, opened)
        except TemplateFailedError as error:
            fields = {"file": path, "messages": tried, "detail": str(error)}
            logger.warning("chat template does not render plain messages", extra=fields)

    def prompt(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """Return the text that an answer to ``messages``, or the rest of the answer they end with, follows.

        Raises:
            RefusedError: MALFORMED; the template does not take the messages.
        """
        return self._up_to_answer(messages, arguments, what="prompt")

    def reply(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        """Return what follows the last message of the assistant, up to where it answers again.

        Raises:
            RefusedError: MALFORMED; as ``prompt``, or the template does not write that message just once.
        """
        last = max(number for number, message in enumerate(messages) if message.get("role") == "assistant")
        marked = [*messages[:last], {**messages[last], "content": _TURN}, *messages[last + 1 :]]
        _, *after = self._up_to_answer(marked, arguments, what="conversation").split(_TURN)
        if len(after) != 1:
            raise RefusedError(
                Reason.MALFORMED,
                f"the chat template writes the assistant's message {len(after)} times: no reply can follow "
                f"it ({self._path})",
            )
        return after[0]

    def _try_answer(self, asked: str, opened: str) -> None:
        """Find out what begins and what ends an answer.

        Args:
            asked: A question as rendered.
            opened: The same, with the beginning of an answer.
        """
        before, *after = self._rendered([_QUESTION, _ANSWER], {}, opens=False).split(_TURN)
        if len(after) != 1:
            return
        opening = before[len(asked) :] if before.startswith(asked) else ""
        self._has_opening = opened != asked or not opening.strip()
        if not self._has_opening:
            logger.info(
                "chat template begins no answer when asked to; prompts get the beginning of its answers",
                extra={"file": self._path, "beginning": opening[:_SHOWN]},
            )
        self.turn_end = after[0].strip()
        if not self.turn_end:  # of some models the next message is the end of the one before
            _, *after = self._rendered([_QUESTION, _ANSWER, _QUESTION], {}, opens=False).split(_TURN)
            self.turn_end = after[0].strip() if len(after) == 1 else ""

    def _up_to_answer(self, messages: Messages, arguments: Mapping[str, Any], *, what: str) -> str:
        readable = [self._readable(message) for message in messages]
        if any(message.get("tool_calls") for message in readable) and not self._takes_calls(arguments):
            raise RefusedError(
                Reason.MALFORMED,
                f"the {what} has calls of tools, which the chat template ({self._path}) leaves out: write "
                "them into the content, or use a model whose template knows tools",
            )
        if readable and readable[-1].get("role") == "assistant":
            readable[-1] = _with_mark(readable[-1], what=what)
        elif not self._has_opening:
            readable.append({"role": "assistant", "content": _HERE})
        else:
            return self._written(readable, arguments, opens=True, what=what)
        before, *after = self._written(readable, arguments, opens=False, what=what).split(_HERE)
        if len(after) != 1:
            raise RefusedError(
                Reason.MALFORMED,
                f"the {what} ends with the beginning of the assistant's answer, which the chat template "
                f"({self._path}) writes {len(after)} times: nothing can go on from it",
            )
        return before

    def _written(self, messages: Messages, arguments: Mapping[str, Any], *, opens: bool, what: str) -> str:
        try:
            return self._rendered(messages, arguments, opens=opens, what=what)
        except TemplateFailedError as error:
            raise RefusedError(Reason.MALFORMED, f"the chat template {error} ({self._path})") from error

    def _readable(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as any template can read it: with a content, in parts only if it reads parts."""
        content = message.get("content")
        if isinstance(content, str):
            return dict(message)
        if content is None:  # beside calls of tools
            return {**message, "content": ""}
        texts = [_text_of(part) for part in content]
        if self._takes_parts():
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        return {**message, "content": "\n".join(texts)}

    def _takes_parts(self) -> bool:
        if self._reads_parts is None:
            parts = [{"type": "text", "text": _HERE}]
            try:
                written = self._rendered([{"role": "user", "content": parts}], {}, opens=False)
            except TemplateFailedError:
                written = ""
            # One that takes any content for a text writes the list as Python does.
            self._reads_parts = _HERE in written and "'type'" not in written and '"type"' not in written
        return self._reads_parts

    def _takes_calls(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the template writes calls of tools; where it takes no such messages, that is said
        when they are rendered."""
        has_tools = bool(arguments.get("tools"))
        if has_tools not in self._writes_calls:
            call = {"type": "function", "id": "call00000", "function": {"name": _HERE, "arguments": {}}}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            answer = {"role": "tool", "content": "a", "name": _HERE, "tool_call_id": "call00000"}
            try:
                written = self._rendered([_QUESTION, calling, answer], arguments, opens=False)
                without = self._rendered([_QUESTION, answer], arguments, opens=False)
            except TemplateFailedError:
                return True
            self._writes_calls[has_tools] = written.count(_HERE) > without.count(_HERE)
        return self._writes_calls[has_tools]

    def _rendered(
        self, messages: Messages, arguments: Mapping[str, Any], *, opens: bool, what: str = "question"
    ) -> str:
        template = self._tokenizer.get_chat_template(None, arguments.get("tools"))
        known = {**self._tokenizer.special_tokens_map, **arguments}
        return self._process.render(template, messages, known, opens=opens, what=what)


def _with_mark(message: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """Return an opened answer with the mark at its end; RefusedError: MALFORMED, nothing can follow it."""
    if message.get("tool_calls"):
        raise RefusedError(
            Reason.MALFORMED,
            f"the {what} ends with a call of a tool by the assistant: the tool's answer has to follow it",
        )
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _HERE}
    *others, last = content
    return {**message, "content": [*others, {**last, "text": last["text"] + _HERE}]}


def _text_of(part: object) -> str:
    """Return a content part's text; RefusedError: MALFORMED, it is an image or the like."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RefusedError(Reason.MALFORMED, f"the prompt has a content part of type {kind!r}; only texts can be")
