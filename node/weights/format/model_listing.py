"""The files of a base model that a newcomer needs, in blocks with digests.

Weights, configuration, tokenizer: formats that are data and nothing else. Code that a model brings is never
among them, nor are pickles.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from node.errors import Reason, RefusedError
from node.weights.format.digests import PAYLOAD_DIGEST_BYTES, payload_digest

BLOCK_BYTES: Final = 16 << 20
"""Lost when a line is cut: seven seconds at 20 Mbit/s. 200 GB are 12 000 blocks with 200 kB of digests."""

MOST_FILES: Final = 1000
MOST_BYTES: Final = 4 << 40

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,198}\.(safetensors|json|jinja|model|txt)")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of the model."""

    name: str
    size_bytes: int
    digests: bytes
    """PAYLOAD_DIGEST_BYTES for each block."""

    @property
    def blocks(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES)

    def extent(self, block: int) -> tuple[int, int]:
        """Return offset and size of a block in the file: the last one may be shorter."""
        offset = block * BLOCK_BYTES
        return offset, min(BLOCK_BYTES, self.size_bytes - offset)

    def is_block(self, block: int, content: bytes) -> bool:
        """Return whether these are the bytes of a block."""
        at = block * PAYLOAD_DIGEST_BYTES
        return payload_digest(content) == self.digests[at : at + PAYLOAD_DIGEST_BYTES]


def listing_of(model_dir: Path) -> tuple[ModelFile, ...]:
    """Read a model directory once. Raises OSError: it cannot be read."""
    files = []
    for path in sorted(model_dir.iterdir()):
        if _NAME.fullmatch(path.name) and path.is_file():
            with path.open("rb") as file:
                digests = b"".join(map(payload_digest, iter(partial(file.read, BLOCK_BYTES), b"")))
                files.append(ModelFile(path.name, file.tell(), digests))
    return tuple(files)


def check_listing(files: tuple[ModelFile, ...]) -> None:
    """Check what a hub lists before a byte is written. Raises RefusedError: MALFORMED or OVER_LIMIT."""
    size = sum(file.size_bytes for file in files)
    if len(files) > MOST_FILES or size > MOST_BYTES:
        raise RefusedError(Reason.OVER_LIMIT, f"a model of {len(files)} files and {size} bytes")
    if len({file.name for file in files}) < len(files):
        raise RefusedError(Reason.MALFORMED, "a model with two files of one name")
    for file in files:
        if not _NAME.fullmatch(file.name):
            raise RefusedError(Reason.MALFORMED, f"{file.name[:100]!r} is not the name of a model's file")
        if len(file.digests) != file.blocks * PAYLOAD_DIGEST_BYTES:
            raise RefusedError(
                Reason.MALFORMED,
                f"{len(file.digests)} bytes of digests for {file.blocks} blocks of {file.name}",
            )
