"""A copy of a model's safetensors files that has another version's words, written a frame at a time.

    file of the model    header: names, dtypes, shapes, places | values
    file of the copy     the same header                       | the version's words, where their tensors lie

So names, shards and index are the model's own, and one frame is in memory. What else is in the files stays.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

from node.weights.assembly.encode import FrameWords
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.model_files import INDEX_FILE, TORCH_NAMES, WHOLE_FILE, weight_files

_HEADER_LIMIT_BYTES: Final = 100_000_000
"""As safetensors itself has it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the values of a tensor lie."""

    file: str
    start: int
    size_bytes: int


class ModelCopy:
    """The files of a copy, open for writing."""

    def __init__(
        self,
        layout: Layout,
        base: FrameWords,
        places: Mapping[str, Sequence[_Place]],
        files: Mapping[str, BinaryIO],
    ) -> None:
        self.layout: Final = layout
        self.base: Final = base
        """Returns a frame of the model's words."""
        self._places = places
        self._files = files

    @classmethod
    @contextmanager
    def opened(
        cls,
        model_dir: Path,
        directory: Path,
        *,
        layout: Layout,
        names: Mapping[str, str],
        base: FrameWords,
    ) -> Iterator[Self | None]:
        """Copy the files into a directory and yield the copy; None: they cannot take words of this layout.

        That is so where a tensor has another shape or dtype in the files than it is published in.

        Args:
            names: names in the files -> the layout's.
        Raises:
            OSError: a file cannot be read or written.
            ValueError: a file is not what safetensors makes.
        """
        places = _places(model_dir, layout, names)
        if places is None:
            yield None
            return
        with ExitStack() as stack:
            files = {}
            for path in weight_files(model_dir):
                shutil.copyfile(path, directory / path.name)
                files[path.name] = stack.enter_context((directory / path.name).open("r+b"))
            if WHOLE_FILE not in files:
                shutil.copyfile(model_dir / INDEX_FILE, directory / INDEX_FILE)
            yield cls(layout, base, places, files)

    def take(self, frame: int, words: Words) -> None:
        """Write the words of a frame.

        Raises:
            OSError: the disk is full or failing.
        """
        for piece in self.layout.overlaps(frame):
            values = words[piece.frame_word :][: piece.words].data.cast("B")
            at = 2 * piece.tensor_word
            for place in self._places[piece.tensor.name]:
                file = self._files[place.file]
                file.seek(place.start + at)
                file.write(values[: place.size_bytes - at])  # the last word may be half empty


def _places(model_dir: Path, layout: Layout, names: Mapping[str, str]) -> dict[str, list[_Place]] | None:
    spans = {span.name: span for span in layout.tensors}
    places: dict[str, list[_Place]] = {name: [] for name in spans}
    for path in weight_files(model_dir):
        for name, dtype, shape, place in _tensors_in(path):
            if (canonical := names.get(name)) is None:
                continue
            span = spans[canonical]
            if (dtype, shape) != (span.dtype.name, span.shape):
                return None
            places[canonical].append(place)
    return places if all(places.values()) else None


def _tensors_in(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], _Place]]:
    """Yield name, dtype if that is floating, shape and place of every tensor in a file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise ValueError(f"{path}: a header of {length} bytes")
        header = json.loads(file.read(length))
    for name, told in header.items():
        if name != "__metadata__":
            first, end = told["data_offsets"]
            shape = tuple(told["shape"])
            yield (
                name,
                TORCH_NAMES.get(told["dtype"], ""),
                shape,
                _Place(path.name, 8 + length + first, end - first),
            )
