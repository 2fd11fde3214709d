"""The tokenizer of a model directory, for every engine alike: prompts and replies to token ids, and back."""

import logging
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from node.errors import Reason, RefusedError
from node.kinds.registry import kind_of
from node.text.text_rules import TextRules
from node.text.tokenizer import chat_template_file, tokenizer_digest
from sampler.engines.engine import Decoder
from sampler.engines.text.chat_template import ChatTemplate
from sampler.engines.text.template_process import TemplateProcess

logger = logging.getLogger(__name__)


def tokenizer_of(model_dir: Path) -> Decoder:
    """Return the tokenizer of a model of any kind; OSError or ValueError if it cannot be loaded."""
    tokenizer, own = ModelTokenizer(model_dir), kind_of(model_dir).tokenizer
    if own is None:
        return tokenizer
    made: Decoder = pkgutil.resolve_name(own)(tokenizer, model_dir)
    return made


class ModelTokenizer:
    """Texts to tokens and back; for any thread.

    Attributes:
        digest: See ``node.text.tokenizer``.
        rules: All that texts and tokens are made by.
        end_ids: The tokens that end a completion: all that generation_config.json, config.json, the tokenizer
            and the chat template name, since each of them may be what the model was trained to end with.
    """

    def __init__(self, model_dir: Path, *, templates: TemplateProcess | None = None) -> None:
        """Load the tokenizer.

        Args:
            templates: Renders the chat template; None: a process of this tokenizer's.
        Raises:
            StartupError: there is no ``tokenizer.json``, or a file beside it is damaged.
            OSError, ValueError: the tokenizer does not load.
        """
        self.digest = tokenizer_digest(model_dir)
        self.rules = TextRules.of(model_dir)
        # No code of a model directory is run: it may come from the coordinator.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        self._template: ChatTemplate | None = None
        if self._tokenizer.chat_template:
            self._template = ChatTemplate(
                self._tokenizer, templates or TemplateProcess(), path=str(chat_template_file(model_dir))
            )
        own = self._tokenizer.eos_token_id
        self.end_ids: frozenset[int] = self.rules.end_ids.union(
            [] if own is None else [own], self._turn_end_ids()
        )
        coded = self._tokenizer("a", return_special_tokens_mask=True)
        self._before: list[int] = coded.input_ids[: coded.special_tokens_mask.index(0)]
        """Tokens that the tokenizer puts before a text."""
        padding = self._tokenizer.pad_token_id
        self._silent = self.end_ids.union([] if padding is None else [padding])
        """Tokens without text."""

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Tokenize a text, or messages in the model's chat template, up to where the assistant answers.

        A text gets the special tokens that the tokenizer puts before one, unless it begins with them; those
        that it puts after one would end the prompt. A template writes its own, so that what it renders gets
        none. Messages that end with the assistant's are gone on with.

        Raises:
            RefusedError: MALFORMED; the template does not take the messages, or there is none.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        return self._encode_rendered(self._chat_template().prompt(prompt, template_arguments or {}))

    def encode_reply(
        self,
        reply: str | Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Tokenize what follows a completion, up to where the assistant answers again.

        What the policy wrote is never tokenized again, since another tokenization would be another
        completion: of a conversation only what the template writes after that message is.

        Args:
            reply: A text, or a conversation in messages: what follows its last message of the assistant.
        Raises:
            RefusedError: MALFORMED; the template does not take the messages, does not write the assistant's
                message just once, or there is none.
        """
        if isinstance(reply, str):
            return self._encode_rendered(reply)
        return self._encode_rendered(self._chat_template().reply(reply, template_arguments or {}))

    def encode_plain(self, text: str) -> NDArray[np.int32]:
        """Tokenize a part of a prompt: nothing is added, and nothing in it is a special token."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return np.array(ids, np.int32)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of a completion: without end and padding, other special tokens as they are written.

        Tags such as ``</think>`` are special tokens of many models.
        """
        return self.decode_window(token_ids.tolist())

    def decode_window(self, token_ids: list[int]) -> str:
        """Return the text of a few tokens, as ``StopSearch`` needs it: what ``decode`` does, fast."""
        spoken = [token for token in token_ids if token not in self._silent]
        return str(self._tokenizer.backend_tokenizer.decode(spoken, skip_special_tokens=False))

    def decode_prompt(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of a prompt, all special tokens included."""
        return str(self._tokenizer.backend_tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise RefusedError(
                Reason.MALFORMED,
                "the prompt is messages, and the model has no chat template: tokenizer.chat_template is not "
                "set",
                fix="give every peer a chat_template.jinja, or set chat = false in the task's options",
            )
        return self._template

    def _turn_end_ids(self) -> frozenset[int]:
        """Return the token with which the template ends the assistant's turn, if it is a token."""
        text = None if self._template is None else self._template.turn_end
        if text is None:
            return frozenset()
        added: Mapping[str, int] = self._tokenizer.get_added_vocab()
        if token := max((token for token in added if text.startswith(token)), key=len, default=""):
            return frozenset([added[token]])
        detail = "it writes nothing after the assistant's message"
        if text:
            detail = f"it ends the assistant's message with {text[:100]!r}, which is not one token"
        fix = "where completions run on to max_new_tokens, name what ends them in coordinator.stop"
        logger.warning("the chat template's end ends no completion", extra={"detail": detail, "fix": fix})
        return frozenset()

    def _encode_text(self, text: str) -> NDArray[np.int32]:
        own = self._tokenizer(text, add_special_tokens=False).input_ids
        begins = own[: len(self._before)] == self._before
        return np.array(own if begins else self._before + own, np.int32)

    def _encode_rendered(self, text: str) -> NDArray[np.int32]:
        return np.array(self._tokenizer(text, add_special_tokens=False).input_ids, np.int32)
