"""An engine that draws all completions of a request in one step, so that nothing runs across versions.

A step takes as many requests as fit one forward pass: small networks cost as much for one row as for many.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from node.errors import Reason, RefusedError
from node.values.groups.rollout import Completion
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine import MOST_ASKED, EngineUse, GenerationRequest
from sampler.engines.torch.live_model import LiveModel

ROWS_AT_ONCE: Final = 64
"""Rows in a forward pass."""


class WholeRequestEngine(ABC):
    """See ``sampler.engines.engine.Engine``; requests wait in the order in which they came."""

    def __init__(self, loaded: LiveModel) -> None:
        """Begin with the base model as version 0."""
        self.layout, self.weights = loaded.layout, loaded.weights
        self._model = loaded.model
        self._random = np.random.default_rng(loaded.generator.initial_seed())
        self._version = 0
        self.use = EngineUse()
        self._waiting: deque[GenerationRequest] = deque()

    @abstractmethod
    def check(self, request: GenerationRequest) -> None:
        """Raise RefusedError if a request cannot be answered."""

    @abstractmethod
    def rows(self, request: GenerationRequest) -> int:
        """Return how many rows a request is in a forward pass."""

    @abstractmethod
    def drawn(self, requests: Sequence[GenerationRequest]) -> Iterable[Iterable[Completion]]:
        """Return the completions of each of some requests, at least one, that were checked.

        One alone may have more than ``ROWS_AT_ONCE`` rows; several have no more together.
        """

    @property
    def running(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerationRequest) -> None:
        self.check(request)
        self._waiting.append(request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        gone = set(request_ids)
        self._waiting = deque(one for one in self._waiting if one.request_id not in gone)

    @torch.inference_mode()
    def step(self) -> list[GenerationRequest]:
        if not self._waiting:
            return []
        self.use = EngineUse(asked_share=min(MOST_ASKED, sum(map(self.rows, self._waiting)) / ROWS_AT_ONCE))
        requests = [self._waiting.popleft()]
        room = ROWS_AT_ONCE - self.rows(requests[0])
        while self._waiting and (room := room - self.rows(self._waiting[0])) >= 0:
            requests.append(self._waiting.popleft())
        drawn = self.drawn(requests)
        return [replace(one, completions=tuple(its)) for one, its in zip(requests, drawn, strict=True)]

    def serve(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}, which is being served")
        self._version = version

    def close(self) -> None:
        self._waiting.clear()
        self._model.to("meta")  # type: ignore[arg-type]
        del self.weights


def refuse_truncation(sampling: SamplingParameters, *, drawn: str) -> None:
    """Refuse whatever cuts a distribution off, but for greed.

    Args:
        drawn: how the kind draws, as the rest of the error's sentence.
    Raises:
        RefusedError: MALFORMED.
    """
    if sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 1 or sampling.stop:
        raise RefusedError(
            Reason.MALFORMED,
            f"{sampling.truncation} stop={list(sampling.stop)}: {drawn}",
            fix="leave top_p, min_p, top_k and stop out of the coordinator's configuration",
        )
