"""From a log ratio to a ratio: the one place where a number is exponentiated that could overflow.

Nothing is held from below, because a ratio of 0 harms nothing. From above a log ratio is held where the
ratio times a reward, the product of two ratios and the squares of both still fit the type. What is held
has no gradient, and is counted: ``StepOutcome.clamped_tokens``.
"""

from typing import Final

import torch
from torch import Tensor

LARGEST_LOG_RATIO: Final = {torch.float32: 20.0, torch.float64: 150.0}
"""Nats. e^20 = 4.9e8 is where VESPO, verl and slime hold theirs: a token that is 20 nats likelier than its
sampler found it says that something is broken, not how much. float64 is for exact numbers, hence wider."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log ratio, nats, held at ``LARGEST_LOG_RATIO``; without gradient where it is held.

    Raises:
        ValueError: the type is narrower than float32.
    """
    check_precision("a log ratio", log_ratio)
    return log_ratio.clamp(max=LARGEST_LOG_RATIO[log_ratio.dtype])


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log ratio), finite for every log ratio that is not NaN.

    Raises:
        ValueError: the type is narrower than float32.
    """
    return torch.exp(bounded(log_ratio))


def is_beyond_bound(log_ratio: Tensor) -> Tensor:
    """Return where ``bounded`` changes a log ratio: [...], bool."""
    return log_ratio.detach() > LARGEST_LOG_RATIO[log_ratio.dtype]


def check_precision(name: str, values: Tensor) -> None:
    """Refuse what is narrower than float32.

    Widening would not help: bfloat16 steps by 0.03 between -4 and -8 nats, so the ratios are already
    off by several per cent when they arrive, which is as wide as a clip.

    Raises:
        ValueError: as said.
    """
    if values.dtype not in LARGEST_LOG_RATIO:
        raise ValueError(
            f"{name} has the type {values.dtype}, allowed are float32 and float64: narrower logprobs are "
            "off by per cents before any formula sees them; take the log softmax in float32"
        )
