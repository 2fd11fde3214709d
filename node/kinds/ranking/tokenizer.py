"""The tokenizer of a model that ranks: queries with candidates to tokens, rankings to text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.errors import Reason, RefusedError
from node.kinds.ranking.values import prompt_of, read_text, separator_of
from node.kinds.registry import model_config
from sampler.engines.text.model_tokenizer import ModelTokenizer


def ranking_tokenizer(tokenizer: ModelTokenizer, model_dir: Path) -> "RankingTokenizer":
    """Return the tokenizer of a model that ranks, given that of its texts."""
    return RankingTokenizer(tokenizer, separator=separator_of(model_config(model_dir)))


class RankingTokenizer:
    """See ``sampler.engines.engine.Tokenizer``."""

    end_ids: Final = None
    """A ranking ends with its last candidate, not with a token."""

    def __init__(self, tokenizer: ModelTokenizer, *, separator: int) -> None:
        self.digest = tokenizer.digest
        self._tokenizer = tokenizer
        self._separator = separator

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Tokenize what ``values.as_text`` wrote.

        Raises:
            RefusedError: MALFORMED; it is something else.
        """
        query, candidates = read_text(prompt)
        ids = [self._tokenizer.encode_plain(text).tolist() for text in (query, *candidates)]
        return prompt_of(ids[0], ids[1:], separator=self._separator)

    def encode_reply(
        self,
        reply: str | Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Raise RefusedError: nobody replies to a ranking."""
        raise RefusedError(Reason.MALFORMED, "a policy that ranks takes no reply to its ranking")

    def decode_prompt(self, token_ids: NDArray[np.int32]) -> str:
        """Return query and candidates with separators between, as the tokenizer writes them."""
        return self._tokenizer.decode_prompt(token_ids)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the numbers of the candidates, best first, with spaces between."""
        return " ".join(map(str, token_ids.tolist()))
