"""The order of payloads on the wire, and which are sent without being asked for; pure."""

from collections.abc import Callable, Iterable
from typing import Final

from node.weights.format.manifest import Manifest

OPENING_BYTES: Final = 2 << 20
"""About what idle connections carry until they fill a link of 100 Mbit/s and 150 ms."""


def first_batch(
    manifest: Manifest, frames: Iterable[int], *, most_bytes: int, is_here: Callable[[int], bool]
) -> tuple[int, ...]:
    """Return the first of ``frames`` to send together: at least one, then those that are here and fit."""
    batch: list[int] = []
    for frame in frames:
        most_bytes -= manifest.frames[frame].payload_bytes
        if batch and (most_bytes < 0 or not is_here(frame)):
            break
        batch.append(frame)
    return tuple(batch)


def largest_first(manifest: Manifest, frames: Iterable[int]) -> list[int]:
    """Sort by size, the largest first; equal sizes in the order of their numbers."""
    return sorted(frames, key=lambda frame: (-manifest.frames[frame].payload_bytes, frame))


def fetch_order(manifest: Manifest, frames: Iterable[int]) -> list[int]:
    """Return frames in the order in which every peer fetches them, so that a relay has what it is asked for.

    Some small ones come first: a relay then has something to forward after a round trip, and the connections
    of the next hop speed up at the same time as its own. Then come the largest, so that the last are small.
    """
    order, opening, opening_bytes = largest_first(manifest, frames), list[int](), 0
    while order and opening_bytes < OPENING_BYTES:
        opening.append(order.pop())
        opening_bytes += manifest.frames[opening[-1]].payload_bytes
    return opening + order


def pushed_frames(manifest: Manifest, *, most_bytes: int, artifact_cost_bytes: int = 0) -> tuple[int, ...]:
    """Return the frames sent without being asked for: those with a payload, largest first, while they fit.

    No frame of a keyframe is, because they arrive sooner over all connections than over one; unless the
    whole is less than ``artifact_cost_bytes``, what the link carries in the round trip of asking for it.
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
