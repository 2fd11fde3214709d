"""An encoder of changes that adds what each leaves over to the next, as a contributor's masters do."""

from collections.abc import Mapping

from torch import Tensor

from learner.merging.changes.coder import ChangeEncoder, Shapes
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.merge_settings import MergeSettings


class FedBackEncoder:
    """Keeps 4 bytes an entry."""

    def __init__(self, settings: MergeSettings, shapes: Shapes) -> None:
        self._encoder = ChangeEncoder(settings, shapes)
        self._left_over: dict[str, Tensor] = {}

    def encode(self, changes: Mapping[str, Tensor], *, words_before: WordsBefore | None = None) -> bytes:
        """Return the payload of a change. Raises ValueError: as ``ChangeEncoder.encode``."""
        due = dict(changes)
        for name in self._left_over.keys() & due.keys():
            due[name] = due[name].float() + self._left_over.pop(name).view(due[name].shape)
        return self._encoder.encode(due, keep=self._left_over.__setitem__, words_before=words_before)
