"""How old a group is when it is trained on, in versions, for each group of each step.

A sampler's behaviour policy is the learner of ``lag`` versions ago. A run's first versions have nothing older
than version 0.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

DELAYS: Final = ("fixed", "humps")
"""All groups as old, or every other one, the rest being fresh."""


def lags(delay: str, *, staleness: int, versions: int, groups: int) -> NDArray[np.int64]:
    """Return the lag of every group, [versions, groups], at most ``staleness`` and the version."""
    is_old = np.ones(groups, np.int64) if delay == "fixed" else np.arange(groups) % 2
    return np.minimum(staleness * is_old, np.arange(versions)[:, None])
