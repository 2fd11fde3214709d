"""Which completions share a micro-batch where rows are laid end to end, without padding.

The learner pads (``packing.micro_batches``); a model that takes packed rows is cut up here.
"""

from collections.abc import Sequence


def first_fit(lengths: Sequence[int], *, budget_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Put each row, the longest first, into the first micro-batch that still has room for it.

    Args:
        lengths: tokens of each row, > 0; equal ones keep their order.
        budget_tokens: most tokens of a micro-batch; a longer row is alone.
        at_least: micro-batches to make, if there are as many rows: one for each process, say.

    Returns:
        Row numbers, each once.

    Raises:
        ValueError: there are fewer rows than micro-batches to make.

    Source: first fit decreasing, as in AReaL's dynamic allocation, arXiv:2505.24298.
    """
    if len(lengths) < at_least:
        raise ValueError(f"{len(lengths)} rows do not fill {at_least} micro-batches")
    bins: list[list[int]] = []
    used: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fitting = (i for i, n in enumerate(used) if n + lengths[row] <= budget_tokens)
        place = next(fitting, len(bins)) if len(bins) >= at_least else len(bins)
        if place == len(bins):
            bins.append([])
            used.append(0)
        bins[place].append(row)
        used[place] += lengths[row]
    return bins
