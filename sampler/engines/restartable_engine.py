"""An engine that is closed and loaded again when it fails: out of memory, a device fault, a library's bug.

    serving --fault--> (none) --loaded again--> the base model: no version until one is restored from the disk

What holds on to the engine holds this one. Between two engines it has no words; texts are still encoded and
decoded.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.errors import Reason, RefusedError, StartupError
from node.weights.format.layout import Layout
from sampler.engines.engine import Engine, EngineUse, GenerationRequest, Tokenizer
from sampler.engines.words.model_words import LiveWords, ModelWords, Spares

logger = logging.getLogger(__name__)

FAULTS: Final = (ArithmeticError, AssertionError, LookupError, MemoryError, OSError, RuntimeError, ValueError)
"""Raised by an engine that fails; torch's errors are RuntimeErrors. Others are our own mistakes."""


class EngineFaultError(Exception):
    """The engine failed, and what it was generating is lost."""


class EngineEndedError(RefusedError):
    """The engine's own process has ended, or was killed because it did not answer.

    Who drives the engine takes it for a fault; for others its words cannot be read for the moment.
    """

    def __init__(self, what: str) -> None:
        super().__init__(Reason.DAMAGED, what)


class RestartableEngine:
    """See ``Engine``. ``restart`` and ``close`` are for the thread that drives the engine."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        """Load an engine; any error is that of ``load``."""
        self._load = load
        engine = load()
        self._engine: Engine | None = engine
        self.layout: Layout = engine.layout
        self.tokenizer: Tokenizer = engine.tokenizer
        self.probe: NDArray[np.int32] = engine.probe
        self.weights: LiveWords = _RestartableWords(self)

    @property
    def current(self) -> Engine:
        """The engine; RefusedError while it is being loaded again."""
        if self._engine is None:
            raise RefusedError(Reason.DAMAGED, "the engine failed and is being loaded again")
        return self._engine

    def restart(self) -> None:
        """Close the engine and load the base model into a new one; StartupError if it is another model."""
        self.close()
        self._engine = self._load()
        if self._engine.layout.digest != self.layout.digest:
            raise StartupError(
                "the model in sampler.model_dir has another layout than when this process started",
                fix="Restore it, and start the sampler again.",
            )

    @property
    def running(self) -> int:
        return 0 if self._engine is None else self._engine.running

    @property
    def waiting(self) -> int:
        return 0 if self._engine is None else self._engine.waiting

    @property
    def use(self) -> EngineUse:
        engine = self._engine
        return EngineUse() if engine is None else engine.use

    def add(self, request: GenerationRequest) -> None:
        self.current.add(request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.current.cancel(request_ids)

    def step(self) -> list[GenerationRequest]:
        return self.current.step()

    def serve(self, version: int) -> None:
        self.current.serve(version)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                engine.close()
            except FAULTS:
                logger.exception("engine not closed")
        gc.collect()


class _RestartableWords:
    """The words of the engine there is."""

    def __init__(self, engine: RestartableEngine) -> None:
        self._engine = engine

    @property
    def live(self) -> ModelWords:
        return self._engine.current.weights.live

    @property
    def spares(self) -> Spares | None:
        return self._engine.current.weights.spares

    def settle(self) -> None:
        self._engine.current.weights.settle()
