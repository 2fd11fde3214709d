"""An engine that draws all completions of a request in one step, so that nothing runs across versions."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from node.rollout import Completion
from sampler.engines.engine import GenerationRequest
from sampler.engines.live_model import LiveModel


class WholeRequestEngine(ABC):
    """See ``sampler.engines.engine.Engine``; requests wait in the order in which they came."""

    def __init__(self, loaded: LiveModel) -> None:
        """Begin with the base model as version 0."""
        self.layout, self.weights = loaded.layout, loaded.weights
        self._model = loaded.model
        self._random = np.random.default_rng(loaded.generator.initial_seed())
        self._version = 0
        self._waiting: deque[GenerationRequest] = deque()

    @abstractmethod
    def check(self, request: GenerationRequest) -> None:
        """Raise RefusedError if a request cannot be answered."""

    @abstractmethod
    def drawn(self, request: GenerationRequest) -> Iterable[Completion]:
        """Return the completions of a request that was checked."""

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
        request = self._waiting.popleft()
        return [replace(request, completions=tuple(self.drawn(request)))]

    def serve(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}, which is being served")
        self._version = version

    def close(self) -> None:
        self._waiting.clear()
        self._model.to("meta")  # type: ignore[arg-type]
        del self.weights
