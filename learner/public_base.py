"""The public base model's words on disk, to be read a frame at a time: every chain starts at version 0."""

from pathlib import Path

import numpy as np

from node.errors import StartupError
from node.weights.digests import Words


def keep_public_base(path: Path, words: Words) -> Words:
    """Write version 0 and give it back as a map of the file: it costs no memory while nobody reads it.

    Raises:
        StartupError: it cannot be written.
    """
    scratch = path.with_suffix(".new")
    try:
        words.astype("<u2", copy=False).tofile(scratch)
        scratch.replace(path)
        mapped: Words = np.memmap(path, dtype=np.uint16, mode="r")
    except OSError as error:
        raise StartupError(
            f"{path} cannot be written: {error}", fix="Make room on the disk of the state directory."
        ) from error
    return mapped
