"""How payloads are put together on the wire, and which are sent without being asked for."""

from collections.abc import Iterator, Sequence

from node.weights.manifest import Manifest


def batches(manifest: Manifest, frames: Sequence[int], *, most_bytes: int) -> Iterator[tuple[int, ...]]:
    """Cut ``frames`` into runs whose payloads have ``most_bytes`` together at most, or one frame each."""
    batch: list[int] = []
    batch_bytes = 0
    for frame in frames:
        size_bytes = manifest.frames[frame].payload_bytes
        if batch and batch_bytes + size_bytes > most_bytes:
            yield tuple(batch)
            batch, batch_bytes = [], 0
        batch.append(frame)
        batch_bytes += size_bytes
    if batch:
        yield tuple(batch)


def pushed_frames(manifest: Manifest, *, most_bytes: int) -> tuple[int, ...]:
    """Give the frames sent unasked: those that have a payload, in order, as long as the next fits whole."""
    frames: list[int] = []
    for frame, record in enumerate(manifest.frames):
        most_bytes -= record.payload_bytes
        if most_bytes < 0:
            break
        if record.payload_bytes:
            frames.append(frame)
    return tuple(frames)
