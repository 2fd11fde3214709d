"""A learner in several processes, each of which has some of the tensors and nothing of the others."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch

from learner.master_words import MasterWords
from node.weights.digests import Words
from node.weights.encode import code_frames
from node.weights.layout import Layout, TensorSpec
from node.weights.manifest import FrameRecord

LAYOUT: Final = Layout.of(
    [TensorSpec(f"layer.{n}", (700 + 300 * n,), "float32" if n == 2 else "bfloat16") for n in range(6)],
    frame_words=1024,
)
"""No frame has two tensors, so that whoever has a tensor can code its frames."""


def tensors_of(names: set[str], *, version: int) -> dict[str, torch.Tensor]:
    """Make the masters of some tensors, a few of whose elements differ from version to version."""
    made = {}
    for number, span in enumerate(LAYOUT.tensors):
        if span.name in names:
            random = torch.Generator().manual_seed(number)
            made[span.name] = torch.randn(span.shape, generator=random) * 0.02
            made[span.name][::50] *= 1 + 0.01 * version
    return made


def names_of(rank: int, *, ranks: int) -> set[str]:
    """Give the tensors that a rank has."""
    return {span.name for number, span in enumerate(LAYOUT.tensors) if number % ranks == rank}


def frames_of(names: set[str]) -> list[int]:
    """Give the frames that these tensors make."""
    frames = range(len(LAYOUT.frames))
    return [frame for frame in frames if {piece.tensor.name for piece in LAYOUT.pieces(frame)} <= names]


def publish_share(rank: int, ranks: int, directory: str) -> None:
    """Code a rank's frames of version 1 from version 0 into files: what runs in a process of its own."""
    names = names_of(rank, ranks=ranks)
    versions = [MasterWords(tensors_of(names, version=number), LAYOUT) for number in range(2)]

    def words(version: int, frame: int) -> Words:
        made = np.empty(LAYOUT.frames[frame].words, np.uint16)
        versions[version].read(frame, made)
        return made

    frames = frames_of(names)
    with (Path(directory) / f"{rank}.payloads").open("wb") as file:
        records = code_frames(
            frames,
            new=lambda frame: words(1, frame),
            base=lambda frame: words(0, frame),
            layout=LAYOUT,
            put=file.write,
            executor=None,
            under_way=1,
        )
    told = [{"frame": frame, **asdict(record)} for frame, record in zip(frames, records, strict=True)]
    text = json.dumps(told, default=lambda digest: digest.hex())
    (Path(directory) / f"{rank}.records").write_text(text)


def read_share(rank: int, directory: Path) -> Iterator[tuple[int, FrameRecord, bytes]]:
    """Give what a rank left: frames, their records and payloads."""
    with (directory / f"{rank}.payloads").open("rb") as file:
        for told in json.loads((directory / f"{rank}.records").read_text()):
            frame, digest = told.pop("frame"), bytes.fromhex(told.pop("payload_digest"))
            record = FrameRecord(**told, payload_digest=digest)
            yield frame, record, file.read(record.payload_bytes)
