"""Work of a device in a second: measured for a core; for GPUs, which never ran this, from data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple


class Interval(NamedTuple):
    """A figure with its bounds."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device."""

    compute_bytes: int
    """Size of an element in matrix products: 2 for bfloat16, 4 for float32."""
    flops_s: Interval
    """Rate in the matrix products of a step."""
    memory_bytes_s: float
    exchange_bytes_s: float
    """Between two ranks of one host, in one direction."""
    reserve_bytes: float
    """For the driver, libraries and fragments of memory."""
    source: str
    """Source of these figures, in words."""


def _gpu(teraflops: float, memory_tb_s: float, exchange_gb_s: float) -> Device:
    return Device(
        2,
        Interval(0.2e12 * teraflops, 0.4e12 * teraflops, 0.6e12 * teraflops),
        0.8e12 * memory_tb_s,
        0.7e9 * exchange_gb_s,
        3e9,
        f"data sheet: {teraflops:g} Tflop/s of dense bfloat16, {memory_tb_s:g} TB/s, {exchange_gb_s:g} GB/s "
        "to a neighbour. Assumed of these: 20 to 60 %, 80 %, 70 %. Not measured: our runs on one H100 and on "
        "one H200 were not timed against it",
    )


DEVICES: Final[Mapping[str, Device]] = {
    "h100": _gpu(989, 3.35, 450),
    "h200": _gpu(989, 4.8, 450),
    "b200": _gpu(2250, 8.0, 900),
    "a100": _gpu(312, 2.0, 300),
    "l40s": _gpu(362, 0.864, 25),
    "4090": _gpu(165, 1.008, 25),
    "core": Device(
        4,
        Interval(50e9, 85e9, 120e9),
        7e9,
        0.5e9,
        0.6e9,
        "a core with AVX-512 in float32: 80 and 92 Gflop/s in two shapes of bench.learner, a copy of 7 GB/s "
        "in bench.weights; assumed: gloo on loopback at 0.5 GB/s",
    ),
}

DELTA_SHARE: Final = Interval(1 / 621, 1 / 227, 1 / 90)
"""Delta over the bfloat16 model: at rates of 3.5e-7, 1.3e-6 and 4.5e-6, which change .33, 1.01 and 2.9 % of
22 million words (bench.weights)."""

KEYFRAME_SHARE: Final = 0.68
"""Keyframe over the bfloat16 model (bench.sync, 135 million parameters)."""

LINE_SHARE: Final = 0.87
"""Payload over what the link could carry (bench.sync: a keyframe takes 1.15 of bytes over bandwidth)."""

APPLY_S: Final = 0.1
"""From the last byte to a served version (bench.sync: 3 to 130 ms at 135 million parameters)."""
