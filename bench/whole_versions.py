"""A whole version in memory, encoded in one call: what benchmarks time and tests compare.

The product never holds all payloads of a version.
"""

from concurrent.futures import Executor
from dataclasses import dataclass

from bench.held_policy import HeldPolicy, check_size
from node.weights.assembly.encode import code_frames, join
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class EncodedVersion:
    """An artifact in memory: ``payloads[i]`` is what ``manifest.frames[i]`` describes."""

    manifest: Manifest
    payloads: tuple[bytes, ...]


def encode_version(
    words: Words,
    *,
    version: int,
    base: HeldPolicy | None,
    layout: Layout,
    run_id: str,
    learner_epoch: int,
    published_at_s: float,
    executor: Executor | None = None,
) -> EncodedVersion:
    """Code words that are in memory, whole, and keep the payloads there too.

    Raises:
        RefusedError: as ``code_frames``.
        ValueError: the words are not of this layout, or ``version`` is not newer than its base.
    """
    check_size(words, layout)
    payloads: list[bytes] = []
    coded = code_frames(
        range(len(layout.frames)),
        new=lambda frame: words[layout.frames[frame].slice],
        base=None if base is None else base.frame_words(layout),
        layout=layout,
        put=payloads.append,
        executor=executor,
        under_way=len(layout.frames),
    )
    manifest = join(
        coded,
        version=version,
        base=None if base is None else base.version,
        layout=layout,
        run_id=run_id,
        learner_epoch=learner_epoch,
        published_at_s=published_at_s,
    )
    return EncodedVersion(manifest, tuple(payloads))
