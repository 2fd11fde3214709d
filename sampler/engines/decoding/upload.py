"""Small tensors for the device, sent without waiting for what it computes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(values: Sequence[object], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``values``, nested or not, as a tensor on ``device``.

    A copy from ordinary memory to a CUDA device waits until every step before it is done; from pinned memory
    it does not.
    """
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
