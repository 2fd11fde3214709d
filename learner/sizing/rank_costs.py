"""Costs of a layout: a rank's memory at the height of a step, the step's time, the samplers' lag; pure.

held         the rank's part of masters, gradients and two moments, float32
gathered     FSDP2: two layers, a layer's gradient, twice each, tensor and buffer; embedding, head, theirs
casts        autocast: a bfloat16 copy of every matrix of the stage, kept until the backward pass
activations  what autograd keeps, of every micro-batch in flight, keys and values as often as rows share them,
             and a chunk of logits
anchor       a contributor's: the version that its change is measured from, and the change that travels
words        of two versions, in the host's memory: a CPU's own
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from learner.sizing.devices import APPLY_S, DELTA_SHARE, KEYFRAME_SHARE, LINE_SHARE, Device, Interval
from learner.sizing.mesh_sizes import MeshSizes
from learner.sizing.model_shape import ModelShape

Rematerialise = Literal["none", "selective", "layers"]

LOGITS_BYTES: Final = 4 << 25
"""One chunk of logits; see ``learner.model.token_logprob``."""

_ADAM_BYTES: Final = 28
"""Read and written by AdamW for each parameter."""

_A_STAGE: Final = 4
"""Micro-batches of a pipeline's round, for each stage; the last are cut smaller for it."""

_HOST_BYTES_S: Final = 20e9
"""Rate of a host's memory, and of PCIe, for what is offloaded; assumed."""


@dataclass(frozen=True, slots=True)
class RankLayout(MeshSizes):
    """How ranks share a model, and what they keep of it; fields as in LearnerConfig, at their defaults."""

    rematerialise: Rematerialise = "none"
    offload: bool = False
    micro_batch_tokens: int = 16_384

    @property
    def keys(self) -> Mapping[str, Any]:
        """The settings of [learner] that differ from their defaults."""
        default = RankLayout()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f"learner.{name}": one for name, one in values.items() if one != getattr(default, name)}


def rank_memory(
    shape: ModelShape,
    layout: RankLayout,
    *,
    compute_bytes: int,
    keys_a_token: float = 1.0,
    kept_bytes: float = 0.0,
) -> dict[str, float]:
    """Return the bytes on the fullest rank, by what they are of; without what libraries take themselves.

    Args:
        keys_a_token: tokens of all rows, for each one that the model reads: attention has keys and values of
            what rows share once for each row.
        kept_bytes: a contributor's, of each parameter beside AdamW's; 0: it is a learner.
    """
    tp, width, tokens = layout.tp, shape.width, layout.micro_batch_tokens
    layer, ends, layers = _layer(shape, tp), _ends(shape, layout), -(-shape.layers // layout.pp)
    stage = layers * layer + ends
    # Counted in what autograd saves: hidden states, norms, casts, which every slice has; inputs of products.
    of_heads = 2 * compute_bytes + (compute_bytes + 4) * shape.has_head_norms
    whole: float = (24 if compute_bytes == 4 else 26) * width
    whole += 2 * compute_bytes * (keys_a_token - 1) * shape.keys / tp
    whole += (of_heads * shape.attention + 4 * compute_bytes * shape.inner) / tp
    products = compute_bytes * (2 * width + 2 * (shape.attention + shape.inner) / tp)
    kept = {"none": whole, "selective": 4 * width + products, "layers": 4 * width}[layout.rematerialise]
    again = 0 if layout.rematerialise == "none" else tokens * whole
    return {
        "held": 0.0 if layout.offload else 16 * stage / layout.dp_shard,
        "gathered": 4.0 * (6 * layer + 3 * ends) if layout.ranks > 1 else 0.0,
        "casts": 2.0 * stage if compute_bytes == 2 else 0.0,
        "activations": tokens * layout.pp * layers * kept + again  # pp of them, one forward one backward
        + min(LOGITS_BYTES, 4 * tokens * shape.vocabulary / tp),
    } | ({"anchor": kept_bytes * stage / layout.dp_shard} if kept_bytes else {})  # fmt: skip


def words_bytes(shape: ModelShape, *, ranks: int) -> float:
    """Return what each rank's host holds of two versions, the published one and the one being made."""
    return 4.0 * shape.parameters / ranks


def step_time(
    shape: ModelShape, layout: RankLayout, device: Device, *, tokens: int, row_tokens: int
) -> Interval:
    """Return the seconds of a step: compute, exchanges and AdamW.

    Torch overlaps the first two in part: at best the shorter is hidden, at worst nothing is, on slow links.

    Args:
        tokens: that the model reads, padding included, shared ones once; row_tokens: of the longest row.
    """
    own = -(-tokens // (layout.dp_replicate * layout.dp_shard))
    micro_batches = math.ceil(own / layout.micro_batch_tokens)
    if layout.pp > 1:
        micro_batches = max(micro_batches, _A_STAGE * layout.pp)
    scores = shape.layers * shape.attention * row_tokens / 2
    flops = 6 * (shape.layers * shape.active_matrices + shape.embedding + scores) * tokens / layout.ranks
    flops *= {"none": 1.0, "selective": 1.1, "layers": 4 / 3}[layout.rematerialise]
    flops *= 1 + (layout.pp - 1) / (_A_STAGE * layout.pp)  # stages idle at both ends of a round
    layers = shape.layers / layout.pp
    stage = math.ceil(layers) * _layer(shape, layout.tp) + _ends(shape, layout)
    # Float32: gathered for the forward and the backward pass, gradients scattered; then copies are added up.
    sharded = 12 * stage * (1 - 1 / layout.dp_shard) * micro_batches
    replicated = 8 * stage / layout.dp_shard * (1 - 1 / layout.dp_replicate) * micro_batches
    sums = 6 if layout.rematerialise == "layers" else 4  # over the hidden states of a layer, there and back
    sliced = 2 * sums * (1 - 1 / layout.tp) * layers * own * shape.width * device.compute_bytes
    exchange = (sharded + replicated + sliced) / device.exchange_bytes_s
    moved = stage / layout.dp_shard
    adam = _ADAM_BYTES * moved / (_HOST_BYTES_S if layout.offload else device.memory_bytes_s)
    adam += 8 * moved * micro_batches / _HOST_BYTES_S if layout.offload else 0.0
    low, middle, high = sorted(flops / rate for rate in device.flops_s)
    return Interval(
        max(low, exchange) + adam,
        max(middle, exchange) + 0.3 * min(middle, exchange) + adam,
        high + 2 * exchange + 2 * adam,
    )


@dataclass(frozen=True, slots=True)
class Lag:
    """Cost to a sampler on a link of following the learner."""

    delta_bytes: Interval
    keyframe_bytes: float
    delta_s: Interval
    keyframe_s: float
    versions: Interval
    """Steps from the one that made a version until it is served; of the link alone, without generation."""


def delta_bytes(shape: ModelShape, *, steps: int = 1) -> Interval:
    """Return the bytes of a delta over so many steps, which change words like a random walk.

    At 16 steps that fits what bench.changes counts; the upper bound is for steps that all go one way.
    """
    growth = (math.sqrt(steps), math.sqrt(steps), steps)
    shares = (share * more for share, more in zip(DELTA_SHARE, growth, strict=True))
    return Interval(*(2.0 * shape.parameters * min(share, KEYFRAME_SHARE) for share in shares))


def lag(shape: ModelShape, *, link_mbit_s: float, step_s: float, delta: Interval | None = None) -> Lag:
    """Return how far a sampler is behind; where deltas take longer than steps, up to a keyframe's time.

    Args:
        step_s: from version to version.
        delta: bytes of a version's, if it is of more than a step.
    """
    whole, bytes_s = 2.0 * shape.parameters, link_mbit_s * 1e6 / 8 * LINE_SHARE
    delta = delta or delta_bytes(shape)
    delta_s = Interval(*(size / bytes_s + APPLY_S for size in delta))
    keyframe_s = whole * KEYFRAME_SHARE / bytes_s + APPLY_S
    behind = (one if one <= step_s else keyframe_s for one in delta_s)
    versions = Interval(*(seconds / step_s for seconds in behind))
    return Lag(delta, whole * KEYFRAME_SHARE, delta_s, keyframe_s, versions)


def _layer(shape: ModelShape, tp: int) -> float:
    return shape.layer_matrices / tp + shape.layer_vectors


def _ends(shape: ModelShape, layout: RankLayout) -> float:
    """Return what the fullest stage has besides layers: one end of the model, where there are two stages."""
    return (shape.ends if layout.pp == 1 else shape.embedding + shape.width) / layout.tp
