"""Prompts to token ids by the model's own tokenizer, for every engine alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from node.errors import Reason, RefusedError


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
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in prompt],
            tokenize=False,
            add_generation_prompt=True,
            **(template_arguments or {}),
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise RefusedError(Reason.MALFORMED, f"the chat template refuses the prompt: {error}") from error
    return np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
