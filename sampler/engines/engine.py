"""The interface of an engine: token ids in, sampled tokens with their logprobs out.

An engine is driven by one thread (``engine_thread``). Between two calls of ``step`` the live words may change
and requests may be added or cancelled. Nothing changes within a step, so every token has one policy version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from node.errors import Reason, RefusedError
from node.values.groups.rollout import Completion
from node.values.groups.sampling_parameters import SamplingParameters
from node.weights.format.layout import Layout
from sampler.engines.words.model_words import LiveWords

PROBE_ID: Final = "probe"
"""The request that tries a new version: the engine's ``probe``, answered with one action."""

TEXT_PROBE: Final = np.arange(4, dtype=np.int32)
"""The ``probe`` of engines that write text: tokens that any vocabulary has."""

GPU_ROWS: Final = 256
CPU_ROWS: Final = 64
"""Completions drawn at once beyond which an engine hardly draws more tokens a second, unless its options say
how many it draws; each group then only takes longer."""

MOST_ASKED: Final = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt to be completed ``wanted`` times; an engine returns it with its completions."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    """[n], n >= 1"""
    wanted: int
    sampling: SamplingParameters
    completions: tuple[Completion, ...] = ()
    """All of them, or none yet."""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How full an engine is at the end of a step, by the two things that may bound it."""

    cache_share: float = 0.0
    """Share of the memory for keys and values that completions fill; 0 where all that they may come to need
    is set aside when they begin, or where nothing is cached."""
    asked_share: float = 0.0
    """Completions asked for over those that the engine draws at once; above 1 some wait. At most
    ``MOST_ASKED``."""

    @classmethod
    def of(cls, *, places_share: float, waiting: float, wanted: int, cache_share: float = 0.0) -> "EngineUse":
        """Return the use of an engine in which completions wait until there is a place for them.

        Completions of a group end one after the other, so a group that waits has more of them left than one
        that is being drawn. What waits is therefore compared with all that the requests ever wanted.

        Args:
            places_share: Of all places, what the completions need that are drawn or wait.
            waiting: Completions that wait.
            wanted: Completions of all requests in the engine, whether they wait, are drawn or have ended.
        """
        asked_share = min(places_share, 1.0)
        if waiting:
            asked_share = max(asked_share, wanted / max(wanted - waiting, 1))
        return cls(cache_share, min(asked_share, MOST_ASKED))


class EngineSettings(Protocol):
    """The fields of ``sampler.config.SamplerConfig`` that are an engine's business."""

    @property
    def model_dir(self) -> Path: ...
    @property
    def device(self) -> str: ...
    @property
    def compute_dtype(self) -> str: ...
    @property
    def apply(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def engine_options(self) -> Mapping[str, Any]: ...


class Tokenizer(Protocol):
    """Texts to tokens and back; for any thread."""

    @property
    def digest(self) -> bytes:
        """The digest to join with; see ``node.text.tokenizer``."""

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Tokenize a text, or messages in the model's chat template; see ``model_tokenizer``."""

    def encode_reply(
        self,
        reply: str | Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Tokenize what follows a completion, or the last message of the assistant in a conversation."""

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of a completion without end and padding, any stop string included."""

    def decode_prompt(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of a prompt, all special tokens included."""


class Decoder(Tokenizer, Protocol):
    """The tokenizer of a kind of models, which also says which tokens end a completion."""

    @property
    def end_ids(self) -> frozenset[int] | None:
        """The tokens that end a completion; None: it ends without one."""


def check_fits(
    request: GenerationRequest, context_tokens: int | None, *, what: str = "the model", or_raise: str = ""
) -> None:
    """Check that prompt and completion fit a context together.

    Args:
        context_tokens: None: there is no limit.
        or_raise: Another way out, as part of a sentence.
    Raises:
        RefusedError: OVER_LIMIT; or the prompt is empty.
    """
    prompt, most_new = len(request.prompt_token_ids), request.sampling.max_new_tokens
    if prompt and (context_tokens is None or prompt + most_new <= context_tokens):
        return
    room = (context_tokens or 0) - most_new
    way_out = (
        f"lower coordinator.max_new_tokens to {context_tokens - prompt} or less"
        if context_tokens is not None and prompt < min(most_new, context_tokens)
        else f"set max_prompt_tokens = {room} in coordinator.task_options, and shorten or remove such rows"
    )
    raise RefusedError(
        Reason.OVER_LIMIT,
        f"a prompt of {prompt} tokens and completions of up to {most_new} do not fit {what}, which takes "
        f"{context_tokens} together",
        fix=f"{way_out}{or_raise and f', or {or_raise}'}",
    )


class Engine(Protocol):
    """Generates in decode steps and accepts new weights between them."""

    @property
    def layout(self) -> Layout:
        """Names, shapes and order of the words."""

    @property
    def weights(self) -> LiveWords:
        """The words the model computes with; at first the base model, version 0."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""

    @property
    def probe(self) -> NDArray[np.int32]:
        """A prompt that the engine accepts: each new version is asked for one action of it, whose logprob
        must be finite."""

    @property
    def running(self) -> int:
        """How many requests were added and are neither returned by ``step`` nor cancelled."""

    @property
    def waiting(self) -> int:
        """How many of ``running`` have no token yet: they wait for memory, or their prompt is being read."""

    @property
    def use(self) -> EngineUse:
        """How full it was at the end of the newest step; for any thread."""

    def add(self, request: GenerationRequest) -> None:
        """Accept a request; it joins the running ones when memory allows.

        Raises:
            RefusedError: MALFORMED if a sampling parameter is out of range, OVER_LIMIT if the
                prompt leaves no room for its completions in the model's context or in memory.
        """

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Forget requests; ignore those not running.

        Without any this asks whether the engine still answers.
        """

    def step(self) -> list[GenerationRequest]:
        """Draw one token for every running completion; return requests found finished, with completions.

        A token's logprob is that of the distribution it was drawn from: the softmax after
        temperature and the renormalisation of min-p, top-k and top-p, in float32. Where these cut
        tokens off, the mass kept goes with it. A completion ends at an end token, a stop string
        or its limit; what was drawn beyond is not part of it. An engine may find this out some
        steps late: call ``step`` while ``running`` is above 0.
        """

    def serve(self, version: int) -> None:
        """Sample from the live words, which were changed to ``version``, in running requests too.

        Raises:
            ValueError: ``version`` is older than the one being served.
        """

    def close(self) -> None:
        """Release the engine's memory and processes, once, after the last step."""
