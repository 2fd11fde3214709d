"""Codes a new version of the weights into frames, and makes its manifest. CPU work: call it in a thread.

    new words of a frame --+
                           +--> code_frames() --> CodedFrames --> join() --> manifest, to be signed
    its base words --------+         |
                                     `--> payloads, in order, to where they are kept

Frames are independent. Each rank of a sharded learner codes the frames it has words of; one rank joins what
all of them coded, and signs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from node.errors import Reason, RefusedError
from node.values.policy import NO_BASE, ROOT_BYTES, PolicyVersion
from node.weights.codec.frame_codec import encode_frame
from node.weights.format.digests import Words, payload_digest, version_root, words_check
from node.weights.format.layout import Layout
from node.weights.format.manifest import FrameRecord, Manifest

FrameWords = Callable[[int], Words]
"""Returns the words of one frame of a version. Called in several threads at once, each for another frame."""


@dataclass(frozen=True, slots=True)
class CodedFrame:
    """The part of a coded frame that a manifest needs. Its payload is kept elsewhere."""

    record: FrameRecord
    digest: int
    """``words_digest`` of the new words."""


def code_frames(
    frames: Iterable[int],
    *,
    new: FrameWords,
    base: FrameWords | None,
    layout: Layout,
    put: Callable[[bytes], object],
    executor: Executor | None,
    under_way: int,
) -> tuple[CodedFrame, ...]:
    """Code each of ``frames`` as small as possible; return them in the same order.

    When this returns or raises, no thread calls ``new`` or ``base`` any more.

    Args:
        base: what the receiver holds; None: the frames are of a keyframe.
        put: takes the payloads, in order, in this thread.
        executor: threads that share the frames and release the interpreter lock; None: this thread alone.
        under_way: frames begun and not yet put, at most; it bounds the memory.
    Raises RefusedError: NON_FINITE, naming the tensor: a NaN or an infinity is never published.
    """
    coded_frames: list[CodedFrame] = []

    def take(coded: tuple[CodedFrame, bytes]) -> None:
        put(coded[1])
        coded_frames.append(coded[0])

    if executor is None:
        for frame in frames:
            take(code_frame(frame, new=new, base=base, layout=layout))
        return tuple(coded_frames)
    begun: deque[Future[tuple[CodedFrame, bytes]]] = deque()
    try:
        for frame in frames:
            begun.append(executor.submit(code_frame, frame, new=new, base=base, layout=layout))
            if len(begun) == under_way:
                take(begun.popleft().result())
        while begun:
            take(begun.popleft().result())
    finally:
        for future in begun:
            future.cancel()
        wait(begun)
    return tuple(coded_frames)


def join(
    coded: Sequence[CodedFrame],
    *,
    version: int,
    base: PolicyVersion | None,
    layout: Layout,
    run_id: str,
    learner_epoch: int,
    published_at_s: float,
) -> Manifest:
    """Return the manifest of all frames of the layout, in order.

    Args:
        base: the version all frames were coded against; None: a keyframe.
    Raises ValueError: frames are missing, or ``version`` is not newer than its base.
    """
    if len(coded) != len(layout.frames):
        raise ValueError(f"{len(coded)} frames were coded, the layout has {len(layout.frames)}")
    if base is None:
        base = PolicyVersion(NO_BASE, bytes(ROOT_BYTES))
    if not base.number < version:
        raise ValueError(f"version {version} cannot start from version {base.number}")
    return Manifest(
        run_id=run_id,
        learner_epoch=learner_epoch,
        layout_digest=layout.digest,
        version=version,
        root=version_root(layout.digest, (frame.digest for frame in coded)),
        base_version=base.number,
        base_root=base.root,
        published_at_s=published_at_s,
        frames=tuple(frame.record for frame in coded),
    )


def code_frame(
    frame: int, *, new: FrameWords, base: FrameWords | None, layout: Layout
) -> tuple[CodedFrame, bytes]:
    """Code one frame as small as possible; return it with its payload.

    Args:
        base: what the receiver holds; None: the frame is of a keyframe.
    Raises RefusedError: as ``code_frames``.
    """
    words = new(frame)
    base_words = None if base is None else base(frame)
    coded = encode_frame(words, base=base_words, dtype=layout.frames[frame].dtype)
    if not coded.is_finite:
        raise _non_finite(words, frame=frame, layout=layout)
    record = FrameRecord(
        codec=coded.codec,
        payload_bytes=len(coded.payload),
        new_check=words_check(coded.digest),
        payload_digest=payload_digest(coded.payload),
    )
    return CodedFrame(record, coded.digest), coded.payload


def _non_finite(words: Words, *, frame: int, layout: Layout) -> RefusedError:
    span = layout.frames[frame]
    byte = (span.dtype.first_not_finite(words) or 0) * span.dtype.element_bytes
    tensor = layout.tensor_at(span.start_word + byte // 2)
    element = (2 * (span.start_word - tensor.start_word) + byte) // span.dtype.element_bytes
    return RefusedError(
        Reason.NON_FINITE,
        f"tensor {tensor.name!r} has a NaN or an infinity at element {element}",
        fix="lower the learning rate or the gradient norm bound; nothing was published",
    )
