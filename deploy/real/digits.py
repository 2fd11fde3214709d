"""Images of handwritten digits, 8 x 8, and a policy and a classifier that know none of them yet."""

import json
import random
from pathlib import Path
from typing import Final

SEED: Final = 0

BRIGHTEST: Final = 16
"""A pixel of scikit-learn's digits."""


def write_digits(path: Path) -> None:
    """Write scikit-learn's 1797 digits in random order, as JSON lines.

    Raises:
        ModuleNotFoundError: there is no scikit-learn; the extra ``test`` installs it.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    images = (digits.images.astype(int) * 255 // BRIGHTEST).tolist()
    rows = [{"image": image, "label": int(label)} for image, label in zip(images, digits.target, strict=True)]
    random.Random(SEED).shuffle(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def mask_directory(directory: Path) -> Path:
    """Save a policy of masks and a classifier of digits, with random weights."""
    from node.kinds.noise_mask.network import NoiseMaskConfig, make_directory

    return make_directory(directory, NoiseMaskConfig(), seed=SEED)
