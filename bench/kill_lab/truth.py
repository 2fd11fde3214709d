"""Reads signed versions and copies on disk without any code that is under test.

Follows proto/WEIGHTS.md: the digests, the manifest and the layout once more, in as few lines as they
take. Words are compared with the learner's own checkpoints, which no codec has touched.
"""

import json
import sqlite3
import struct
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import blake3
import numpy as np
import torch
import xxhash
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray
from safetensors import safe_open

Words = NDArray[np.uint16]

_FRAME_WORDS: Final = 1 << 20
_HEADER: Final = struct.Struct("<8s q q q d 16s 16s 16s I B")
_FRAME: Final = struct.Struct("<I I 16s")
_HELD: Final = struct.Struct("<8s q 16s 16s")
_SIGNATURE_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Signed:
    """An artifact as the learner signed it."""

    version: int
    base_version: int
    learner_epoch: int
    root: bytes
    payloads: tuple[tuple[int, bytes], ...]
    """(size, digest) of each frame's payload."""

    @property
    def size_bytes(self) -> int:
        return sum(size for size, _ in self.payloads)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """An artifact as it lies on a disk."""

    signed: Signed
    intact_bytes: int
    """Payload bytes of the frames that are there whole."""

    @property
    def is_whole(self) -> bool:
        return self.intact_bytes == self.signed.size_bytes


def read_manifest(data: bytes, public_key: bytes) -> Signed | None:
    """Return what was signed; None where the signature is not the learner's."""
    message, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
        key.verify(signature, b"heterorl-manifest-v1\0" + message)
    except InvalidSignature:
        return None
    _, learner_epoch, version, base_version, _, _, root, _, _, name_bytes = _HEADER.unpack_from(message)
    rows = _FRAME.iter_unpack(message[_HEADER.size + name_bytes :])
    payloads = tuple((coding >> 4, digest) for coding, _, digest in rows)
    return Signed(version, base_version, learner_epoch, root, payloads)


def read_artifact(directory: Path, public_key: bytes) -> OnDisk | None:
    """Read an artifact's directory; None where there is none, or no manifest of the learner's."""
    try:
        signed = read_manifest((directory / "manifest").read_bytes(), public_key)
        data = (directory / "frames").read_bytes()
    except OSError:
        return None
    if signed is None:
        return None
    intact, offset = 0, 0
    for size, digest in signed.payloads:
        if blake3.blake3(data[offset : offset + size]).digest(length=16) == digest:
            intact += size
        offset += size
    return OnDisk(signed, intact)


def read_artifacts(directories: Iterable[Path], public_key: bytes) -> list[OnDisk]:
    """Read those of the directories that are artifacts."""
    return [found for directory in directories if (found := read_artifact(directory, public_key)) is not None]


class Model:
    """The layout of a model, and the roots of its versions."""

    def __init__(self, base: Path) -> None:
        """Take names and shapes from the base model's safetensors file."""
        with safe_open(base, "pt") as file:
            self._shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        self._names = sorted(self._shapes, key=str.encode)
        hasher = blake3.blake3(b"heterorl-layout-v1\0" + struct.pack("<I", _FRAME_WORDS))
        for name in self._names:
            for text in (name.encode(), b"bfloat16"):
                hasher.update(struct.pack("<I", len(text)) + text)
            shape = self._shapes[name]
            hasher.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        self._digest = hasher.digest(length=16)

    def root(self, words: Words) -> bytes:
        """Return the root of a version from its words."""
        digests = [
            xxhash.xxh3_64_intdigest(words[start : start + _FRAME_WORDS].tobytes())
            for start in range(0, words.size, _FRAME_WORDS)
        ]
        return blake3.blake3(self._digest + struct.pack(f"<{len(digests)}Q", *digests)).digest(length=16)

    def words(self, *paths: Path) -> Words:
        """Read the tensors of safetensors files as words; float32 is rounded to nearest, ties to even.

        Each file may have a part of a tensor, and says where in the whole it begins.

        Raises:
            ValueError: an element is in no file.
        """
        whole = {name: np.zeros(self._shapes[name], np.uint16) for name in self._names}
        filled = dict.fromkeys(self._names, 0)
        for path in paths:
            with safe_open(path, "pt") as file:
                parts = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    values = _words_of(file.get_tensor(name))
                    first = parts.get(name, {}).get("saved_offsets", [0] * values.ndim)
                    box = tuple(slice(at, at + size) for at, size in zip(first, values.shape, strict=True))
                    whole[name][box] = values
                    filled[name] += values.size
        if short := [name for name in self._names if filled[name] < whole[name].size]:
            raise ValueError(f"{short[0]} is not there as a whole")
        return self._in_a_row(whole)

    def rounded(self, tensors: Mapping[str, torch.Tensor]) -> Words:
        """Return the words of whole tensors, rounded as ``words`` does."""
        return self._in_a_row({name: _words_of(tensor) for name, tensor in tensors.items()})

    def _in_a_row(self, whole: Mapping[str, Words]) -> Words:
        return np.concatenate([whole[name].reshape(-1) for name in self._names])


def _words_of(tensor: torch.Tensor) -> Words:
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def read_copy(path: Path) -> tuple[int, bytes, Words] | None:
    """Read a sampler's copy: version, the root it is said to have, words; None where there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    _, version, root, _ = _HELD.unpack_from(data)
    return version, root, np.frombuffer(data, "<u2", offset=_HELD.size)


def read_journal(path: Path) -> Mapping[int, tuple[str, ...]]:
    """Return the groups of every step in a learner's journal, which it may be writing."""
    steps = {}
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as journal:
            texts = [json.loads(text) for (text,) in journal.execute("SELECT text FROM entries")]
    except sqlite3.OperationalError:  # not there yet, or its learner was killed as it wrote
        return {}
    for line in (text["step"]["line"] for text in texts if "step" in text):
        steps[line["version"]] = tuple(group["group_id"] for group in line["groups"])
    return steps
