"""Which rank codes which frame, and what the others send it for that; pure, and the same on every rank.

Each frame goes to the rank that holds most of its words, as long as that rank has no more than its share of
all words; what is left goes where least is. So no rank exceeds its share by a frame, and few words travel:
hardly any where shards are larger than frames.

What several ranks hold, one of them sends, and none to a rank that holds it itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from learner.ranks.boxes import Box, Places, Sharding, coordinates
from learner.sizing.mesh_sizes import MeshSizes
from node.weights.format.layout import Layout, Overlap


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A rank's part of the words that a frame and a tensor have in common."""

    piece: Overlap
    count: int
    """Elements."""
    box: Box
    """The rank's part of the tensor."""

    def places(self) -> tuple[Places, Places]:
        """Return where the elements lie in the rank's part of the tensor, and where in the piece."""
        source, to, _ = self.box.within(*_elements(self.piece))
        return source, to

    @property
    def size_bytes(self) -> int:
        """Size of the elements as they are published."""
        return self.count * self.piece.tensor.dtype.element_bytes


class FramePlan:
    """Who codes which frame of a layout, and of what."""

    def __init__(self, layout: Layout, shardings: Mapping[str, Sharding], sizes: MeshSizes) -> None:
        """Plan for a mesh of these sizes."""
        self.layout = layout
        self._shardings = shardings
        self._ranks = coordinates(sizes)
        self._boxes = [
            {name: sharding.box(at, sizes) for name, sharding in shardings.items()} for at in self._ranks
        ]
        frames = range(len(layout.frames))
        self.owners = frame_owners([frame.words for frame in layout.frames], [self._held(f) for f in frames])
        """The rank that codes each frame."""

    def own(self, rank: int) -> list[int]:
        """Return the frames of a rank, ascending."""
        return [frame for frame, owner in enumerate(self.owners) if owner == rank]

    def rounds(self, frames: int) -> list[list[int]]:
        """Return rounds of every rank's next ``frames`` frames, each rank's ascending."""
        own = [self.own(rank) for rank in range(len(self._ranks))]
        starts = range(0, max(map(len, own)), frames)
        return [[frame for of_rank in own for frame in of_rank[start : start + frames]] for start in starts]

    def parts(self, frame: int, *, sender: int) -> Iterator[Part]:
        """Yield what a rank sends to a frame's owner, or what the owner has of it itself."""
        owner = self.owners[frame]
        for piece in self.layout.overlaps(frame):
            name, boxes = piece.tensor.name, self._boxes
            if sender != owner:
                is_there = boxes[sender][name] == boxes[owner][name]
                if is_there or not self._shardings[name].is_sent_by(self._ranks[sender]):
                    continue
            box = boxes[sender][name]
            if here := box.count(*_elements(piece)):
                yield Part(piece, here, box)

    def _held(self, frame: int) -> list[int]:
        pieces = list(self.layout.overlaps(frame))
        return [
            sum(boxes[piece.tensor.name].count(*_elements(piece)) for piece in pieces)
            for boxes in self._boxes
        ]


def frame_owners(words: Sequence[int], held: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the rank that codes each frame.

    Args:
        words: of each frame.
        held: for each frame, how many of its elements each rank holds.
    """
    ranks = len(held[0])
    share, loads, owners = -(-sum(words) // ranks), [0] * ranks, [0] * len(words)
    # Frames that a single rank has most of come first: for the others it matters less.
    for frame in sorted(range(len(words)), key=lambda frame: -max(held[frame]) / max(1, sum(held[frame]))):
        with_room = [rank for rank in range(ranks) if loads[rank] + words[frame] <= share]
        if with_room:
            owner = max(with_room, key=lambda rank: (held[frame][rank], -loads[rank]))
        else:
            owner = min(range(ranks), key=loads.__getitem__)
        owners[frame] = owner
        loads[owner] += words[frame]
    return tuple(owners)


def _elements(piece: Overlap) -> tuple[int, int]:
    """Return the first element of a tensor that lies in a piece, and how many do."""
    width = piece.tensor.dtype.element_bytes
    first = 2 * piece.tensor_word // width
    return first, min(2 * piece.words // width, piece.tensor.elements - first)
