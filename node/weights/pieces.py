"""How payloads are put together on the wire, and which are sent without being asked for."""

from collections.abc import Callable, Iterable

from node.weights.manifest import Manifest


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
