"""Whole versions in a sampler's state directory: the public base model and a copy of the held policy.

    base.words    see ``node.weights.assembly.public_base``
    held.words    magic | version i64 | root 16 | BLAKE3-16 of all before | words u16...        little-endian

The root is computed again when a file is read; a damaged copy counts as none.
"""

import logging
import os
import struct
from pathlib import Path
from typing import Final

import blake3
import numpy as np

from node.system import durable
from node.values.policy import PolicyVersion
from node.weights.assembly.public_base import PublicBase, TakeWords
from node.weights.format.layout import Layout
from sampler.engines.words.model_words import ArrayWords, ModelWords, copy_words, frame_digests, version_of

logger = logging.getLogger(__name__)

_HEADER: Final = struct.Struct("<8s q 16s")
_DIGEST_BYTES: Final = 16
_MAGIC: Final = b"HRLHELD\0"


def keep_base(path: Path, live: ModelWords, *, layout: Layout) -> PublicBase:
    """Write the base model, which is in ``live``, unless the file holds it already.

    Raises StartupError: the file cannot be written.
    """

    def copy(take: TakeWords) -> None:
        for number, frame in enumerate(layout.frames):
            take(number, live.read(frame))

    return PublicBase.keep(path, frame_digests(live, layout.frames), copy, layout=layout)


def save_held(path: Path, version: PolicyVersion, words: ModelWords, *, layout: Layout) -> None:
    """Replace the copy of the held policy. Raises OSError; the old copy is then unchanged."""
    with durable.replacing(path) as file:
        header = _HEADER.pack(_MAGIC, version.number, version.root)
        file.write(header + _digest(header))
        file.flush()
        _write_frames(file.fileno(), words, layout=layout)


def load_held(path: Path, *, layout: Layout, into: ModelWords) -> PolicyVersion | None:
    """Load the copy of the held policy and return its version.

    Return None and write nothing if there is no copy, or if it is damaged or of another model. The file is
    read twice: nothing is written before all of it is verified.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            is_whole = file.read(_DIGEST_BYTES) == _digest(header)
            words_at = file.tell()
        magic, number, root = _HEADER.unpack(header)
        copy = ArrayWords(np.memmap(path, dtype="<u2", mode="r", offset=words_at))
        if copy.words.size != layout.words:
            raise ValueError(f"{copy.words.size} words, but the layout has {layout.words}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, struct.error) as error:
        logger.warning("saved policy not usable", extra={"path": str(path), "detail": str(error)})
        return None
    version = PolicyVersion(number, root)
    if not is_whole or magic != _MAGIC or version_of(number, copy, layout=layout) != version:
        logger.warning("saved policy damaged", extra={"path": str(path), "version": number})
        return None
    copy_words(copy, into, layout=layout)
    return version


def _write_frames(descriptor: int, words: ModelWords, *, layout: Layout) -> None:
    for frame in layout.frames:
        rest = words.read(frame).data.cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _digest(header: bytes) -> bytes:
    return blake3.blake3(header).digest(length=_DIGEST_BYTES)
