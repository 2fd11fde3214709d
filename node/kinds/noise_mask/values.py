"""Images as token ids, and noise masks of them as completions: a Beta policy over the cells of a grid.

    prompt      the label, then the pixels, 0 to 255, row after row, a pixel's channels together
    completion  a real action in [0, 1] for each cell, row after row, each with its log-density

The policy gives every cell a Beta(e^a, e^b). The mask drawn from them is stretched over the image, blurred
and multiplied with it; a classifier beside the policy is asked for the label, and minus its cross-entropy is
the reward. Policy gradient-driven noise masks, arXiv:2406.14568.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from node.errors import Reason, RefusedError
from node.values.groups.rollout import RolloutGroup

LEVELS: Final = 256
"""Values of a pixel."""

EDGE: Final = 2.0**-20
"""Least distance of a drawn action from 0 and 1, where densities have no bound."""


@dataclass(frozen=True, slots=True)
class MaskSizes:
    """Sizes of the images that a policy of masks reads, and of its masks."""

    pixels: int
    """Pixels of an image, times its channels."""
    classes: int
    cells: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read them from a model's config.json."""
        pixels = config["height"] * config["width"] * config["channels"]
        return cls(pixels, config["classes"], config["grid"] ** 2)

    def check_prompt(self, prompt: NDArray[np.integer]) -> None:
        """Check that a prompt is a label and an image.

        Raises:
            RefusedError: MALFORMED; it is not.
        """
        if len(prompt) != 1 + self.pixels or not 0 <= prompt[0] < self.classes:
            raise RefusedError(
                Reason.MALFORMED,
                f"a prompt of {len(prompt)} tokens that begins with {prompt[:1].tolist()} is not a label "
                f"below {self.classes} and an image of {self.pixels} pixels",
                fix="use the task noise_mask, and images of the size in the model's config.json",
            )
        if prompt[1:].min() < 0 or prompt[1:].max() >= LEVELS:
            raise RefusedError(
                Reason.MALFORMED,
                f"the image has pixels of {prompt[1:].min()} to {prompt[1:].max()}, not 0 to {LEVELS - 1}",
            )

    def objection(self, group: RolloutGroup) -> str | None:
        """Return why no policy of masks can have made a group, which is well-formed; None: one can."""
        try:
            self.check_prompt(group.prompt_token_ids)
        except RefusedError as refused:
            return refused.what
        if group.sampling.temperature != 1:
            return f"a mask has no temperature, and this one claims {group.sampling.temperature:g}"
        for number, completion in enumerate(group.completions):
            if completion.actions is None:
                return f"completion {number} has tokens for actions, where a mask has real numbers"
            if len(completion.actions) != self.cells:
                return (
                    f"completion {number} is a mask of {len(completion.actions)} cells, not of {self.cells}"
                )
            if completion.is_drawn is not None:
                return f"completion {number} has cells that were not drawn"
        return None


def read_row(image: object, label: object) -> tuple[int, NDArray[np.integer]]:
    """Return the label and the pixels of a row's columns.

    Args:
        image: rows of pixels, each a number or a list of one for each channel; or base64 of the bytes.
    Raises:
        ValueError: they are something else.
    """
    if isinstance(image, str):
        pixels: NDArray[Any] = np.frombuffer(base64.b64decode(image, validate=True), np.uint8)
    else:
        pixels = np.array(image).ravel()
    if pixels.dtype.kind not in "iu" or not pixels.size or pixels.min() < 0 or pixels.max() >= LEVELS:
        raise ValueError(
            f"the image is {image!r:.100}, not rows of whole numbers below {LEVELS}, or their base64"
        )
    if type(label) is not int or label < 0:
        raise ValueError(f"the label is {label!r:.100}, not the number of a class")
    return label, pixels


def as_text(label: int, pixels: NDArray[np.integer]) -> str:
    """Return label and pixels as the prompt of a task, a word for each token."""
    return " ".join(map(str, (label, *pixels.tolist())))
