"""A row of the task ``noise_mask``: an image and the number of its class."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from node.kinds.noise_mask.values import read_row
from node.questions.data_row import RowError, found_in
from node.tasks.task_options import TaskOptions


class NoiseMaskOptions(TaskOptions):
    """Options of ``noise_mask``: images and their labels are columns of the rows."""

    takes_rows = True

    image: str = "image"
    """Column with the image: lists of rows of pixels, 0 to 255, each a number or one for each channel; or
    their bytes in this order as base64. See ``column_of`` for what is inside one."""
    label: str = "label"
    """Column with the number of the image's class, from 0."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {"image": self.image, "label": self.label}

    def check_row(self, row: Mapping[str, Any]) -> None:
        noise_mask_row(row, self)


def noise_mask_row(row: Mapping[str, Any], options: NoiseMaskOptions) -> tuple[int, NDArray[np.integer]]:
    """Return label and pixels of a row; RowError where it has something else."""
    image, label = found_in(row, options.image), found_in(row, options.label)
    if type(label) is not int or label < 0:
        raise RowError(options.label, "is not the number of a class", value=label)
    try:
        return read_row(image, label)
    except (ValueError, TypeError, OverflowError) as error:
        rule = "is not rows of whole numbers from 0 to 255, nor base64 of them"
        raise RowError(options.image, rule, value=image) from error
