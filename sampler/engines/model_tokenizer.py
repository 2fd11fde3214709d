"""The tokenizer of a model directory, for every engine alike: prompts and replies to token ids, and back."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from node.errors import Reason, RefusedError
from node.tokenizer import tokenizer_digest

_TURN: Final = "\N{OBJECT REPLACEMENT CHARACTER}turn\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for what the policy wrote while a template is rendered."""


class ModelTokenizer:
    """Texts to tokens and back; for any thread.

    Attributes:
        digest: See ``node.tokenizer``.
        encode: ``encode_prompt`` with this tokenizer.
        encode_reply: The function of this name with this tokenizer.
        end_ids: The tokens that end a completion: those of the generation settings, else the tokenizer's.
    """

    def __init__(self, model_dir: Path) -> None:
        """Load the tokenizer.

        Raises:
            StartupError: there is no ``tokenizer.json``.
            OSError, ValueError: the tokenizer or the model's configuration does not load.
        """
        self.digest = tokenizer_digest(model_dir)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self.encode = partial(encode_prompt, self._tokenizer)
        self.encode_reply = partial(encode_reply, self._tokenizer)
        if (model_dir / "generation_config.json").exists():
            settings = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
        else:
            settings = GenerationConfig.from_model_config(
                AutoConfig.from_pretrained(model_dir, local_files_only=True)
            )
        ids = self._tokenizer.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
        self.end_ids: frozenset[int] = frozenset([ids] if isinstance(ids, int) else ids or ())

    def encode_plain(self, text: str) -> NDArray[np.int32]:
        """Tokenize a part of a prompt: nothing is added, and nothing in it is a special token."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return np.array(ids, np.int32)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of a completion, without special tokens."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def decode_window(self, token_ids: list[int]) -> str:
        """Return the text of a few tokens, as ``StopSearch`` needs it: fast, without special tokens."""
        return str(self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True))


def encode_prompt(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, str]],
    template_arguments: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Tokenize a text, or messages in the tokenizer's chat template, up to where the assistant answers.

    A text gets the special tokens that the tokenizer adds. A template writes its own, so that what it renders
    gets none: a second BOS would make another prompt.

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
        reply: A text, or a conversation in messages: what follows its last message of the assistant.
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
