"""A learner in several processes, each of which has the tensors of its frames and nothing of the others."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch

from learner.training.master_words import MasterWords
from node.weights.assembly.encode import CodedFrame, code_frames
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import FrameRecord

LAYOUT: Final = Layout.of(
    [TensorSpec(f"layer.{n}", (700 + 300 * n,), "float32" if n == 2 else "bfloat16") for n in range(6)],
    frame_words=1024,
)


def tensors_of(names: set[str], *, version: int) -> dict[str, torch.Tensor]:
    """Make the masters of some tensors, a few of whose elements differ from version to version."""
    made = {}
    for number, span in enumerate(LAYOUT.tensors):
        if span.name in names:
            random = torch.Generator().manual_seed(number)
            made[span.name] = torch.randn(span.shape, generator=random) * 0.02
            made[span.name][::50] *= 1 + 0.01 * version
    return made


def frames_of(rank: int, *, ranks: int) -> range:
    """Return the frames that a rank publishes."""
    count = len(LAYOUT.frames)
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def names_of(frames: range) -> set[str]:
    """Return the tensors that frames are made of: that which a rank ends in, the next may begin in."""
    return {piece.tensor.name for frame in frames for piece in LAYOUT.overlaps(frame)}


def publish_share(rank: int, ranks: int, directory: str) -> None:
    """Code a rank's frames of version 1 from version 0 into files: what runs in a process of its own."""
    frames = frames_of(rank, ranks=ranks)
    masters = [MasterWords(tensors_of(names_of(frames), version=number), LAYOUT) for number in range(2)]

    def words(version: int, frame: int) -> Words:
        made = np.empty(LAYOUT.frames[frame].words, np.uint16)
        masters[version].read(frame, made)
        return made

    with (Path(directory) / f"{rank}.payloads").open("wb") as file:
        coded = code_frames(
            frames,
            new=lambda frame: words(1, frame),
            base=lambda frame: words(0, frame),
            layout=LAYOUT,
            put=file.write,
            executor=None,
            under_way=1,
        )
    told = [{"digest": each.digest, **asdict(each.record)} for each in coded]
    text = json.dumps(told, default=lambda digest: digest.hex())
    (Path(directory) / f"{rank}.coded").write_text(text)


def read_share(rank: int, directory: Path) -> Iterator[tuple[CodedFrame, bytes]]:
    """Return what a rank left of each of its frames, in order, and the payload."""
    with (directory / f"{rank}.payloads").open("rb") as file:
        for told in json.loads((directory / f"{rank}.coded").read_text()):
            digest, payload_digest = told.pop("digest"), bytes.fromhex(told.pop("payload_digest"))
            record = FrameRecord(**told, payload_digest=payload_digest)
            yield CodedFrame(record, digest), file.read(record.payload_bytes)
