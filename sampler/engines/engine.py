"""What the rollout loop asks of whatever generates: token ids in, sampled tokens with their logprobs out.

An engine is driven from one thread. Between two calls of ``step`` the live words may be changed and
requests added or cancelled; nothing changes within a step, so every token has one version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from node.rollout import SamplingParameters
from node.weights.format.layout import Layout
from sampler.engines.live_words import LiveWords


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt to be completed ``completions`` times."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    """[n], n >= 1"""
    completions: int
    sampling: SamplingParameters


@dataclass(frozen=True, slots=True, eq=False)
class SampledCompletion:
    """One completion as it was drawn; fields as in ``node.rollout.Completion``."""

    token_ids: NDArray[np.int32]
    behaviour_logprob: NDArray[np.float32]
    policy_version: NDArray[np.int32]
    is_finished: bool
    kept_mass: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRequest:
    """All completions of one request."""

    request_id: str
    completions: tuple[SampledCompletion, ...]


class Engine(Protocol):
    """Generates in decode steps and takes new weights between them."""

    @property
    def layout(self) -> Layout:
        """Names, shapes and order of the words."""
        ...

    @property
    def weights(self) -> LiveWords:
        """The words the model computes with: the base model, version 0, at first."""
        ...

    @property
    def tokenizer_digest(self) -> bytes:
        """As joined with; see ``node.tokenizer``."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def running(self) -> int:
        """Requests added and not yet finished or cancelled."""
        ...

    def encode(self, text: str) -> NDArray[np.int32]:
        """Tokenize a prompt."""
        ...

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Give the text of a completion without special tokens."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Take a request in; it joins the running ones at the next step.

        Raises:
            RefusedError: MALFORMED for sampling parameters out of range, OVER_LIMIT for a
                prompt that leaves no room for its completions.
        """
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Forget requests; those not running are passed over."""
        ...

    def step(self) -> list[FinishedRequest]:
        """Draw one token for every running completion; give the requests this finished.

        Each token's logprob is exactly that of the distribution it was drawn from: the
        softmax after temperature, top-k and top-p renormalisation, in float32; with it, where
        something was cut off, goes the mass kept.
        """
        ...

    def serve(self, version: int) -> None:
        """Note what the live words were changed to: they are sampled from now on, for running requests too.

        Raises:
            ValueError: ``version`` is older than the one being served.
        """
        ...
