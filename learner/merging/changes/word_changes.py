"""Changes as the words of a version that they make others of, by the codec of versions.

    x           what has changed, with what earlier ones left over
    before      the words of the version that the steps began from, as both ends have them
    after       float(before) + x, rounded to the model's own dtype
    handed in   float(after) - float(before); the rest is fed back

    for each frame with a tensor of the change:
        the words after, coded against those before | u32: their check

So an entry is handed in once it changes what the next forward pass computes with. The check tells a
receiver whose words before are others.

Source: PULSELoCo's gate, arXiv:2602.03839v2; the coding is ours, proto/WEIGHTS.md.
"""

import struct
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.merging.changes.payload_parts import PayloadReader, PayloadWriter
from node.weights.format.digests import Words, words_check
from node.weights.format.layout import Layout, Overlap


@dataclass(frozen=True, slots=True)
class WordsBefore:
    """A version that both ends hold."""

    layout: Layout
    frame: Callable[[int], Words]
    """Returns the words of one frame, which nobody may write."""


def write_words(
    due: Callable[[str], Tensor],
    names: Set[str],
    before: WordsBefore,
    to: PayloadWriter,
    *,
    keep: Callable[[str, Tensor], None],
) -> None:
    """Append the changes of ``names``, in the order of the layout.

    Args:
        due: Returns a change with what earlier ones left over, flat, float32; it is written here.
        keep: Takes what is left of a change, once all of it is appended.
    Raises:
        ValueError: a tensor is not one of floats, or its words would have a NaN or an infinity.
    """
    left: dict[str, Tensor] = {}
    for frame, pieces in _frames(before.layout, names):
        old = before.frame(frame).copy()
        new = old.copy()
        for piece in pieces:
            name = piece.tensor.name
            if name not in left:
                left[name] = due(name)
            part = left[name][_entries(piece)]
            was, becomes = _floats(old, piece), _floats(new, piece)
            becomes.copy_(was.double() + part)
            part -= (becomes.double() - was.double()).float()
            if _is_last(piece):
                keep(name, left.pop(name))
        digest = to.put_frame(new, base=old, dtype=before.layout.frames[frame].dtype)
        to.put(struct.pack("<I", words_check(digest)))


def read_words(names: Set[str], before: WordsBefore, reader: PayloadReader) -> Iterator[tuple[str, Tensor]]:
    """Yield the changes of ``names``, flat, float64, in the order of the layout.

    Raises:
        ValueError: the payload is broken, or ``before`` is not what it was coded against.
    """
    changes: dict[str, Tensor] = {}
    for frame, pieces in _frames(before.layout, names):
        old, span = before.frame(frame).copy(), before.layout.frames[frame]
        new, digest = reader.frame(span.words, base=old, dtype=span.dtype)
        (check,) = struct.unpack("<I", reader.take(4))
        if words_check(digest) != check:
            raise ValueError(f"frame {frame} was coded against other words than the version's")
        for piece in pieces:
            name = piece.tensor.name
            if name not in changes:
                changes[name] = torch.empty(piece.tensor.elements, dtype=torch.float64)
            change = _floats(new, piece).double() - _floats(old, piece).double()
            changes[name][_entries(piece)] = change
            if _is_last(piece):
                yield name, changes.pop(name)


def _frames(layout: Layout, names: Set[str]) -> Iterator[tuple[int, list[Overlap]]]:
    """Yield the frames that have a part of one of ``names``, with these parts.

    Raises:
        ValueError: the layout has no floats under a name.
    """
    floating = {span.name for span in layout.tensors if span.dtype.is_floating}
    if strange := sorted(names - floating):
        raise ValueError(f"versions have no floats under the names {', '.join(strange[:3])}")
    for frame in range(len(layout.frames)):
        pieces = [piece for piece in layout.overlaps(frame) if piece.tensor.name in names]
        if pieces:
            yield frame, pieces


def _is_last(piece: Overlap) -> bool:
    return piece.tensor_word + piece.words == piece.tensor.words


def _entries(piece: Overlap) -> slice:
    """Return which entries of its tensor a piece has."""
    width = piece.tensor.dtype.element_bytes
    first = 2 * piece.tensor_word // width
    return slice(first, min(first + 2 * piece.words // width, piece.tensor.elements))


def _floats(words: Words, piece: Overlap) -> Tensor:
    """Return a view of a piece's entries, which is written through to ``words``."""
    dtype = getattr(torch, piece.tensor.dtype.name)
    entries = _entries(piece)
    part = torch.from_numpy(words[piece.frame_word :][: piece.words])
    return part.view(dtype)[: entries.stop - entries.start]
