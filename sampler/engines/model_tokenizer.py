"""The tokenizer of a model directory, as every engine uses it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from node.tokenizer import tokenizer_digest
from sampler.engines.prompt_encoding import encode_prompt, encode_reply


class ModelTokenizer:
    """Texts to tokens and back; for any thread.

    Attributes:
        digest: See ``node.tokenizer``.
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
        if (model_dir / "generation_config.json").exists():
            settings = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
        else:
            settings = GenerationConfig.from_model_config(
                AutoConfig.from_pretrained(model_dir, local_files_only=True)
            )
        ids = self._tokenizer.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
        self.end_ids: frozenset[int] = frozenset([ids] if isinstance(ids, int) else ids or ())

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Tokenize as ``encode_prompt`` does."""
        return encode_prompt(self._tokenizer, prompt, template_arguments)

    def encode_reply(
        self,
        reply: str | Sequence[Mapping[str, str]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Tokenize as ``prompt_encoding.encode_reply`` does."""
        return encode_reply(self._tokenizer, reply, template_arguments)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of a completion, without special tokens."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def decode_window(self, token_ids: list[int]) -> str:
        """Return the text of a few tokens, as ``StopSearch`` needs it: fast, without special tokens."""
        return str(self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True))
