"""A design task, a contextual bandit on scikit-learn's digits: name the digit on an 8x8 image.

The completion is one token. 1437 images to learn from, 360 held out, the same split for every seed.
"""

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.staleness_lab.batched import Shapes, choice
from bench.staleness_lab.tasks import Completions

_NAME: Final = "digits.npz"
_PIXELS: Final = 64
_HIDDEN: Final = 64
_CLASSES: Final = 10
_HELD_OUT: Final = 360
_SPLIT_SEED: Final = 0
_BRIGHTEST: Final = 16.0


def cache_digits(folder: Path) -> None:
    """Write scikit-learn's digits to ``folder`` unless they are there; a run needs only this file.

    Raises:
        ModuleNotFoundError: the file is missing, and so is scikit-learn.
    """
    path = folder / _NAME
    if path.exists():
        return
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, image=digits.data.astype(np.uint8), label=digits.target.astype(np.uint8))


class DigitsBandit:
    """A perceptron 64-64-10 whose ten outputs are the policy."""

    groups = 16
    group_size = 8
    tokens = 1
    steps = 1
    shifts = False

    def __init__(self, folder: Path) -> None:
        with np.load(folder / _NAME) as stored:
            image, label = stored["image"], stored["label"]
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(label))
        images = torch.from_numpy(image[order].astype(np.float32) / _BRIGHTEST)
        labels = torch.from_numpy(label[order].astype(np.int64))
        self._image, self._label = images[:-_HELD_OUT], labels[:-_HELD_OUT]
        self._held_out_image, self._held_out_label = images[-_HELD_OUT:], labels[-_HELD_OUT:]
        self.shapes = Shapes(
            {
                "hidden": (_PIXELS, _HIDDEN),
                "hidden_bias": (_HIDDEN,),
                "output": (_HIDDEN, _CLASSES),
                "output_bias": (_CLASSES,),
            }
        )
        self.prompts = len(self._label)

    def start(self, seeds: tuple[int, ...]) -> Tensor:
        """Return untrained policies, close to uniform, [seeds, parameters]."""
        theta = self.shapes.initial(seeds)
        self.shapes.views(theta)["output"].mul_(0.1)
        return theta

    def sample(self, theta: Tensor, prompt: Tensor, uniform: Tensor) -> Completions:
        """Choose G digits for each image; ``uniform`` is [rows, n, G, 1]."""
        each = self._policy(theta, self._image[prompt])  # [rows, n, classes]
        expanded = each.unsqueeze(2).expand(-1, -1, uniform.shape[2], -1)
        action = choice(expanded.exp(), uniform.squeeze(-1))
        return Completions(
            token=action.unsqueeze(-1),
            mask=torch.ones_like(uniform, dtype=torch.bool),
            reward=(action == self._label[prompt].unsqueeze(-1)).float(),
            log_probability=expanded.unsqueeze(3),
        )

    def log_probability(self, theta: Tensor, prompt: Tensor, token: Tensor) -> Tensor:
        """Return [rows, n, G, 1, 10]; every completion of an image shares its distribution."""
        each = self._policy(theta, self._image[prompt])
        return each[:, :, None, None].expand(-1, -1, token.shape[2], -1, -1)

    def score(self, theta: Tensor) -> Tensor:
        """Return the held-out accuracy of the most probable digit, [rows]."""
        images = self._held_out_image.expand(theta.shape[0], -1, -1)
        return (self._policy(theta, images).argmax(-1) == self._held_out_label).float().mean(1)

    def _policy(self, theta: Tensor, image: Tensor) -> Tensor:
        p = self.shapes.views(theta)
        hidden = torch.baddbmm(p["hidden_bias"].unsqueeze(1), image, p["hidden"]).relu()
        return torch.baddbmm(p["output_bias"].unsqueeze(1), hidden, p["output"]).log_softmax(-1)
