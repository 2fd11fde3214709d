"""How much an old group still counts. Sees the age of a group, never its rewards."""


def version_discount(staleness_versions: int, *, half_life_versions: float) -> float:
    """Give 2 ** (-staleness / half life): 1 for a fresh group, 1/2 after one half life.

    Args:
        staleness_versions: learner version minus the oldest behaviour version, >= 0.
        half_life_versions: > 0; infinity counts every group in full.

    Returns:
        In [0, 1], dimensionless.

    Raises:
        ValueError: the staleness is negative, or the half life is not positive.
    """
    if staleness_versions < 0:
        raise ValueError(f"staleness is {staleness_versions} versions; a group from the future is not ours")
    if not half_life_versions > 0:
        raise ValueError(f"half_life_versions is {half_life_versions}, allowed is > 0")
    return float(2.0 ** (-staleness_versions / half_life_versions))
