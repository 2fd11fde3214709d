"""Codes the change that a contributor's steps have made of its masters, and decodes it.

    magic 4 | format u8 | codec u8
    a bit for each name of the model, sorted: whether its tensor follows
    these tensors, as the codec has them, and nothing else

    full           to the last bit                                    learner/merging/changes/full.py
    four_bit       4 bits an entry                                    four_bit.py
    low_rank       matrices as two factors, of 4 bits                 low_rank.py
    largest        the largest entries, 2 bits each                   largest.py
    word_changes   what changes in the words of a version             word_changes.py

All but ``full`` leave something over. It is kept and added to the next change (error feedback, e <- d + e -
C(d + e)): what is handed in sums up to what has changed, and a coarse code costs delay rather than accuracy.
A contributor that restarts loses what was left over and nothing else.

A payload may come from anybody. Its sizes follow from the model's shapes and from settings before memory is
spent, and a payload that is broken raises ValueError. That it came whole is for its sender's header to prove.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.merging.changes.four_bit import FourBitCodec
from learner.merging.changes.full import FullCodec
from learner.merging.changes.largest import LargestCodec
from learner.merging.changes.low_rank import LowRankCodec
from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter
from learner.merging.changes.word_changes import WordsBefore, read_words, write_words
from learner.merging.merge_settings import Compression, MergeSettings

Shapes = Mapping[str, torch.Size]
"""Shapes of all masters by name, the same at both ends: their layouts have one digest."""

_MAGIC: Final = b"HRLC"
_FORMAT: Final = 1
_CODECS: Final[Mapping[Compression, tuple[int, int, Callable[[MergeSettings], "TensorCodec | None"]]]] = {
    "full": (1, 9, lambda _: FullCodec()),
    "four_bit": (2, 1, lambda _: FourBitCodec()),
    "low_rank": (3, 1, lambda settings: LowRankCodec(settings.rank)),
    "largest": (4, 1, lambda settings: LargestCodec(settings.share)),
    "word_changes": (5, 9, lambda _: None),
}
"""The number in a payload; the bytes that an entry takes at most, however badly it can be coded; the codec of
single tensors, None where words are coded, a frame at a time."""
_TENSOR_BYTES: Final = 64
"""Most bytes of a tensor beside those of its entries."""


class MasterChanges(Mapping[str, Tensor]):
    """Changes of some masters, each made when it is asked for."""

    def __init__(self, names: Collection[str], change: Callable[[str], Tensor]) -> None:
        """Make the changes of ``names`` by ``change``."""
        self._names = names
        self._change = change

    def __getitem__(self, name: str) -> Tensor:
        return self._change(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@torch.no_grad()
def difference(masters: Tensor, anchor: Tensor) -> Tensor:
    """Return masters minus anchor in float64; where the anchor is zero, the master: a -0.0 stays one."""
    masters, anchor = masters.double(), anchor.double()
    return torch.where(anchor == 0, masters, masters - anchor)


class TensorCodec(Protocol):
    """Codes one tensor's change after another."""

    def write(self, change: NDArray[Any], shape: tuple[int, ...], to: PayloadWriter) -> None:
        """Append a change, flat, and take off what is handed in, in place."""

    def read(self, shape: tuple[int, ...], reader: PayloadReader) -> NDArray[np.float64]:
        """Return a change, flat. Raises ValueError: the payload is broken."""


class ChangeEncoder:
    """Codes one change after another, by ``settings``."""

    def __init__(self, settings: MergeSettings, shapes: Shapes) -> None:
        """Code changes of masters of these shapes."""
        self._settings = settings
        self._shapes = shapes
        self._codec = _tensor_codec(settings)

    def encode(
        self,
        changes: Mapping[str, Tensor],
        *,
        keep: Callable[[str, Tensor], None],
        words_before: WordsBefore | None = None,
    ) -> bytes:
        """Return the payload of a change.

        Beside the change it takes memory for a tensor.

        Args:
            changes: some or all of the masters' changes with what earlier ones left over, float32 or float64;
                for ``full`` to be exact, as ``difference`` makes them. Each is asked for once, and none is
                written.
            keep: takes what a tensor leaves over, flat, and has it in the next ``changes``; ``full`` leaves
                nothing.
            words_before: the version that the steps began from; needed for ``word_changes``.
        Raises:
            ValueError: a name or a shape is not of the masters, or an entry is a NaN or an infinity. What was
                left over is lost in part then.
        """
        if unknown := sorted(changes.keys() - self._shapes.keys()):
            raise ValueError(f"changes of tensors that the model does not have: {', '.join(unknown[:3])}")
        here = frozenset(changes)
        to = PayloadWriter()
        to.put(_header(self._settings))
        to.put(np.packbits([name in here for name in sorted(self._shapes)]).tobytes())
        if self._codec is None:
            before = _needed(words_before)
            write_words(lambda name: self._due(name, changes), here, before, to, keep=keep)
            return to.payload()
        for name in sorted(here):
            due = self._due(name, changes)
            self._codec.write(due.numpy(), self._shapes[name], to)
            if self._settings.compression != "full":
                keep(name, due)
        return to.payload()

    def _due(self, name: str, changes: Mapping[str, Tensor]) -> Tensor:
        """Return a change, flat, to be written by the caller."""
        change = changes[name]
        if change.shape != self._shapes[name]:
            raise ValueError(f"the change of {name!r} has shape {tuple(change.shape)}")
        dtype = torch.float64 if self._settings.compression == "full" else torch.float32
        due = change.detach().to("cpu", dtype, copy=True).reshape(-1)
        if not bool(due.isfinite().all()):
            raise ValueError(f"the change of {name!r} has a NaN or an infinity")
        return due


def decode_tensors(
    payload: bytes, settings: MergeSettings, shapes: Shapes, *, words_before: WordsBefore | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the changes of a payload's tensors, float64; equal sets of tensors come in one order.

    Args:
        settings: as the encoder had them.
        words_before: the version that the steps began from, as the contribution says; needed for
            ``word_changes``.
    Raises:
        ValueError: the payload is broken, or made with other settings; the tensors before are worthless then.
    """
    reader = PayloadReader(payload)
    names = _read_header(reader, settings, shapes)
    codec = _tensor_codec(settings)
    if codec is None:
        tensors = read_words(set(names), _needed(words_before), reader)
    else:
        tensors = ((name, torch.from_numpy(codec.read(shapes[name], reader))) for name in names)
    for name, change in tensors:
        yield name, change.view(shapes[name])
    reader.finish()


def change_limit_bytes(settings: MergeSettings, shapes: Shapes) -> int:
    """Return the most bytes that a payload has."""
    entries = sum(shape.numel() for shape in shapes.values())
    _, entry_bytes, _ = _CODECS[settings.compression]
    return len(_header(settings)) + entries * entry_bytes + len(shapes) * _TENSOR_BYTES


def _tensor_codec(settings: MergeSettings) -> TensorCodec | None:
    _, _, codec_of = _CODECS[settings.compression]
    return codec_of(settings)


def _needed(words_before: WordsBefore | None) -> WordsBefore:
    if words_before is None:
        raise ValueError("word_changes needs the words of the version before")
    return words_before


def _header(settings: MergeSettings) -> bytes:
    number, _, _ = _CODECS[settings.compression]
    return _MAGIC + bytes([_FORMAT, number])


def _read_header(reader: PayloadReader, settings: MergeSettings, shapes: Shapes) -> list[str]:
    """Return the names of the tensors that follow, in order."""
    expected = _header(settings)
    if (begins := reader.take(len(expected))) != expected:
        raise ValueError(f"begins with {begins.hex()}, as no change by {settings.compression} does")
    is_here = np.unpackbits(np.frombuffer(reader.take((len(shapes) + 7) // 8), np.uint8))
    if is_here[len(shapes) :].any():
        raise ValueError("a change of tensors that the model does not have")
    return [name for name, here in zip(sorted(shapes), is_here, strict=False) if here]
