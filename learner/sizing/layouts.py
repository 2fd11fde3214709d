"""Every layout of a number of ranks, each as fast as the memory allows, the best first; pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, get_args

from learner.sizing.devices import Device, Interval
from learner.sizing.model_shape import ModelShape
from learner.sizing.rank_costs import RankLayout, Rematerialise, rank_memory, step_time, words_bytes

GPUS_A_HOST: Final = 8
"""Slices add up in every layer, so they stay on one host."""

_ALIKE: Final = 1.15
"""A layout within this factor of the fastest counts as equally fast: the estimates are no better."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A layout, and what it costs."""

    layout: RankLayout
    memory: dict[str, float]
    needed_bytes: float
    """Memory needed on the fullest rank, the device's reserve included."""
    fits: bool
    step_s: Interval


def plan_layouts(
    shape: ModelShape,
    device: Device,
    *,
    ranks: int,
    memory_bytes: float,
    tokens: int,
    row_tokens: int,
    keys_a_token: float = 1.0,
    kept_bytes: float = 0.0,
) -> list[Planned]:
    """Return every way to cut the model over ``ranks``: those that fit, the simplest of the fast first.

    Args:
        tokens: of a step; ``row_tokens``: of its longest row; ``keys_a_token``, ``kept_bytes``: see
            ``rank_memory``.
    """
    on_gpu = device.compute_bytes == 2

    def planned(layout: RankLayout) -> Planned:
        compute_bytes = device.compute_bytes
        memory = rank_memory(
            shape, layout, compute_bytes=compute_bytes, keys_a_token=keys_a_token, kept_bytes=kept_bytes
        )
        if not on_gpu:
            memory["words"] = words_bytes(shape, ranks=ranks)
        needed = sum(memory.values()) + device.reserve_bytes
        seconds = step_time(shape, layout, device, tokens=tokens, row_tokens=row_tokens)
        return Planned(layout, memory, needed, needed <= memory_bytes, seconds)

    def cost(one: Planned) -> tuple[bool, float]:
        return not one.fits, one.step_s.middle if one.fits else one.needed_bytes

    tried = (map(planned, _ways(sizes, row_tokens, on_gpu=on_gpu)) for sizes in _cuts(shape, ranks))
    best = [min(ways, key=cost) for ways in tried]
    bound = _ALIKE * min(one.step_s.middle for one in best)

    def order(one: Planned) -> tuple[bool, bool, int, float]:
        is_fast = one.fits and one.step_s.middle <= bound
        return not one.fits, not is_fast, _complexity(one.layout) if is_fast else 0, cost(one)[1]

    return sorted(best, key=order)


def _cuts(shape: ModelShape, ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield dp_replicate, dp_shard, tp and pp whose product is ``ranks`` and which divide the model."""
    for tp in _divisors(min(ranks, GPUS_A_HOST)):
        if ranks % tp or shape.heads % tp or shape.kv_heads % tp:
            continue
        for pp in _divisors(ranks // tp):
            for dp_shard in _divisors(ranks // tp // pp):
                if pp <= shape.layers:
                    yield ranks // tp // pp // dp_shard, dp_shard, tp, pp


def _ways(sizes: tuple[int, int, int, int], row_tokens: int, *, on_gpu: bool) -> Iterator[RankLayout]:
    tokens = max(RankLayout().micro_batch_tokens, row_tokens)
    while tokens >= row_tokens:
        for rematerialise in get_args(Rematerialise):
            for offload in (False, True) if on_gpu and sizes[1] > 1 else (False,):
                yield RankLayout(*sizes, rematerialise, offload, tokens)
        tokens //= 2


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _complexity(layout: RankLayout) -> int:
    cuts = ((1, layout.dp_shard), (1, layout.dp_replicate), (2, layout.tp), (3, layout.pp))
    return (
        sum(weight for weight, size in cuts if size > 1)
        + (layout.rematerialise != "none")
        + 4 * layout.offload
    )
