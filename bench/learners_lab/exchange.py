"""What travels from a learner to the one that merges: a change as it is received, and its bytes."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from bench.staleness_lab.batched import Shapes
from learner.merging.merge_settings import MergeSettings

FLOAT32_BYTES: Final = 4


class Exchange:
    """Carries the changes of every learner and seed of a cell, and adds their bytes up."""

    def __init__(self, settings: MergeSettings, shapes: Shapes, *, learners: int, seeds: int) -> None:
        self._settings = settings
        self._senders = learners * seeds
        self.sent_bytes = 0.0
        """By one learner, mean over learners and seeds."""

    def carried(self, changes: Tensor, names: Sequence[str], version: Tensor) -> Tensor:
        """Return changes [learners, seeds, columns] of the tensors ``names`` as they arrive, float64."""
        self.sent_bytes += FLOAT32_BYTES * changes.shape[-1]
        return changes
