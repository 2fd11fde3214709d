"""How payloads are put together on the wire, and which are sent without being asked for."""

from collections.abc import Callable, Iterable
from typing import Final

from node.weights.format.manifest import Manifest

_OPENING_BYTES: Final = 2 << 20
"""About what idle connections carry before they are as fast as a link of 100 Mbit/s and 150 ms."""


def first_batch(
    manifest: Manifest, frames: Iterable[int], *, most_bytes: int, is_here: Callable[[int], bool]
) -> tuple[int, ...]:
    """Give the first of ``frames`` that travel together: at least one, else what is here and fits."""
    batch: list[int] = []
    for frame in frames:
        most_bytes -= manifest.frames[frame].payload_bytes
        if batch and (most_bytes < 0 or not is_here(frame)):
            break
        batch.append(frame)
    return tuple(batch)


def largest_first(manifest: Manifest, frames: Iterable[int]) -> list[int]:
    """Give the largest first; of those as large, the first."""
    return sorted(frames, key=lambda frame: (-manifest.frames[frame].payload_bytes, frame))


def fetch_order(manifest: Manifest, frames: Iterable[int]) -> list[int]:
    """Give frames in the order in which everyone fetches them, so that a relay has what is asked of it.

    Some small ones come first: a relay then has something to pass on after a round trip, and the connections
    of the next hop grow fast at the same time as its own. Then the largest, so that the last are small.
    """
    order, opening, opening_bytes = largest_first(manifest, frames), list[int](), 0
    while order and opening_bytes < _OPENING_BYTES:
        opening.append(order.pop())
        opening_bytes += manifest.frames[opening[-1]].payload_bytes
    return opening + order


def pushed_frames(manifest: Manifest, *, most_bytes: int, artifact_cost_bytes: int = 0) -> tuple[int, ...]:
    """Return the frames sent unasked: those that have a payload, largest first, as long as the next fits.

    None of a keyframe, whose frames come sooner over all connections than over one; unless all of it is
    less than ``artifact_cost_bytes``, what the link carries in the round trip of asking for it.
    """
    frames: list[int] = []
    if manifest.key.is_keyframe and manifest.size_bytes > artifact_cost_bytes:
        return ()
    for frame in largest_first(manifest, range(len(manifest.frames))):
        most_bytes -= manifest.frames[frame].payload_bytes
        if most_bytes < 0 or not manifest.frames[frame].payload_bytes:
            break
        frames.append(frame)
    return tuple(frames)
