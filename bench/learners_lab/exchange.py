"""The way from a learner to the one that merges: a change as it arrives, and its bytes."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from bench.shared.fed_back_encoder import FedBackEncoder
from bench.staleness_lab.batched import Shapes
from learner.masters.master_words import MasterWords
from learner.merging.changes.coder import decode_tensors
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.merge_settings import MergeSettings
from node.weights.format.layout import Layout, TensorSpec

FLOAT32_BYTES: Final = 4


class Exchange:
    """Carries the changes of every learner and seed of a cell, and adds their bytes up.

    ``full``, which is exact, counts as float32 and is not coded.
    """

    def __init__(self, settings: MergeSettings, shapes: Shapes, *, learners: int, seeds: int) -> None:
        self._settings = settings
        self._names = list(shapes.named)
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.named.items()}
        self._encoders = [
            [FedBackEncoder(settings, self._shapes) for _ in range(seeds)] for _ in range(learners)
        ]
        self.sent_bytes = 0.0
        """By one learner, mean over learners and seeds."""

    def carried(self, changes: Tensor, names: Sequence[str], version: Tensor) -> Tensor:
        """Return changes as they arrive, float64.

        Args:
            changes: [learners, seeds, columns] of the tensors ``names``, one after the other, float64.
            names: in the model's order.
            version: [seeds, parameters], that the changes were measured from.
        """
        if self._settings.compression == "full":
            self.sent_bytes += FLOAT32_BYTES * changes.shape[-1]
            return changes
        before = [self._words_before(row) for row in version]
        carried = torch.empty_like(changes)
        for of_seeds, encoders, arrived in zip(changes, self._encoders, carried, strict=True):
            for seed, (change, encoder) in enumerate(zip(of_seeds, encoders, strict=True)):
                payload = encoder.encode(self._tensors(change, names), words_before=before[seed])
                tensors = dict(
                    decode_tensors(payload, self._settings, self._shapes, words_before=before[seed])
                )
                arrived[seed] = torch.cat([tensors[name].flatten() for name in names])
                self.sent_bytes += len(payload) / changes.shape[:2].numel()
        return carried

    def _words_before(self, version: Tensor) -> WordsBefore | None:
        if self._settings.compression != "word_changes":
            return None
        words = MasterWords(self._tensors(version.clone(), self._names), self._layout)
        return WordsBefore(self._layout, words.frame)

    @cached_property
    def _layout(self) -> Layout:
        return Layout.of(TensorSpec(name, tuple(shape)) for name, shape in self._shapes.items())

    def _tensors(self, columns: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Return views of [columns], by name."""
        sizes = [math.prod(self._shapes[name]) for name in names]
        parts = torch.split(columns, sizes)
        return {name: part.view(self._shapes[name]) for name, part in zip(names, parts, strict=True)}
