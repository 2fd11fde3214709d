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


def largest_first(manifest: Manifest, frames: Iterable[int]) -> list[int]:
    """Give frames in the order in which everyone fetches them, so that a relay has what is asked of it."""
    return sorted(frames, key=lambda frame: (-manifest.frames[frame].payload_bytes, frame))


def pushed_frames(manifest: Manifest, *, most_bytes: int) -> tuple[int, ...]:
    """Give the frames sent unasked: those that have a payload, largest first, as long as the next fits.

    None of a keyframe: frames so large come sooner over all connections than over one.
    """
    frames: list[int] = []
    if manifest.key.is_keyframe:
        return ()
    for frame in largest_first(manifest, range(len(manifest.frames))):
        most_bytes -= manifest.frames[frame].payload_bytes
        if most_bytes < 0 or not manifest.frames[frame].payload_bytes:
            break
        frames.append(frame)
    return tuple(frames)
