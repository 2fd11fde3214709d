"""A copy of the held policy on disk, so that a restarted sampler need not start from version 0.

    magic | version i64 | root 16 | BLAKE3-16 of all before | words u16...        little-endian

The root is computed again when the copy is read: a damaged copy is no copy.
"""

import logging
import struct
from pathlib import Path
from typing import Final

import blake3
import numpy as np

from node import durable
from node.policy import PolicyVersion
from node.weights.format.layout import Layout
from sampler.engines.live_words import ModelWords
from sampler.versions.model_words import ArrayWords, copy_words, version_of, write_frames

logger = logging.getLogger(__name__)

_HEADER: Final = struct.Struct("<8s q 16s")
_DIGEST_BYTES: Final = 16
_MAGIC: Final = b"HRLHELD\0"


def save_held(path: Path, version: PolicyVersion, words: ModelWords, *, layout: Layout) -> None:
    """Replace the copy; the old one or the new one survives whatever happens.

    Raises:
        OSError: the disk is full or broken; the old copy is as it was.
    """
    with durable.replacing(path) as file:
        header = _HEADER.pack(_MAGIC, version.number, version.root)
        file.write(header + _digest(header))
        file.flush()
        write_frames(file.fileno(), words, layout=layout)


def load_held(path: Path, *, layout: Layout, into: ModelWords) -> PolicyVersion | None:
    """Copy the copy ``into`` memory and name it; None if there is none, or it is damaged or of another model.

    It is read twice: nothing is written before all of it is known to be right.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            is_whole = file.read(_DIGEST_BYTES) == _digest(header)
            words_at = file.tell()
        magic, number, root = _HEADER.unpack(header)
        copy = ArrayWords(np.memmap(path, dtype="<u2", mode="r", offset=words_at))
        if copy.words.size != layout.words:
            raise ValueError(f"{copy.words.size} words, the layout has {layout.words}")
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


def _digest(header: bytes) -> bytes:
    return blake3.blake3(header).digest(length=_DIGEST_BYTES)
