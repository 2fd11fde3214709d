"""Prompts and replies to token ids by the model's own tokenizer, for every engine alike."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from node.errors import Reason, RefusedError

_TURN: Final = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for what the policy wrote while a template is rendered."""


def encode_prompt(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, str]],
    template_arguments: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Tokenize a text, or messages in the tokenizer's chat template, up to where the assistant answers.

    A text gets the special tokens that the tokenizer adds. A template writes its own, so that what it renders
    gets none: a second BOS would make another prompt.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: A text, or a list of {"role": ..., "content": ...}.
        template_arguments: Variables of the chat template.
    Raises:
        RefusedError: MALFORMED; the template does not take the messages, or there is none.
    """
    if isinstance(prompt, str):
        return np.array(tokenizer(prompt).input_ids, np.int32)
    return _encode(tokenizer, _rendered(tokenizer, prompt, template_arguments, what="prompt"))


def encode_reply(
    tokenizer: Any,
    reply: str | Sequence[Mapping[str, str]],
    template_arguments: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Tokenize what follows a completion, up to where the assistant answers again.

    What the policy wrote is never tokenized again, since another tokenization would be another completion. A
    conversation is rendered with a mark in the place of the assistant's last message, and what the template
    writes after the mark is tokenized: the end of that message, the reply, the beginning of the next turn.

    Args:
        tokenizer: A transformers tokenizer.
        reply: A text, or a conversation in messages: what follows its last message of the assistant.
        template_arguments: Variables of the chat template.
    Raises:
        RefusedError: MALFORMED; the template does not take the messages, does not write the assistant's
            message just once, or there is none.
    """
    if isinstance(reply, str):
        return _encode(tokenizer, reply)
    last = max(number for number, message in enumerate(reply) if message["role"] == "assistant")
    marked = [*reply[:last], {**reply[last], "content": _TURN}, *reply[last + 1 :]]
    _, *after = _rendered(tokenizer, marked, template_arguments, what="conversation").split(_TURN)
    if len(after) != 1:
        raise RefusedError(
            Reason.MALFORMED,
            f"the chat template writes the assistant's message {len(after)} times: no reply can follow it",
        )
    return _encode(tokenizer, after[0])


def _rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    template_arguments: Mapping[str, Any] | None,
    *,
    what: str,
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **(template_arguments or {}),
            )
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise RefusedError(Reason.MALFORMED, f"the chat template refuses the {what}: {error}") from error


def _encode(tokenizer: Any, text: str) -> NDArray[np.int32]:
    return np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
