"""Costs of a round in which several sites train and one merges: bytes, seconds, memory; arithmetic, no torch.

    contributor --payload--> learner --delta--> hub --delta--> contributors, samplers
                <--groups---

    exchange    payloads of all contributors into the learner's line, the delta up to the hub and down again,
                round trips; before the next steps (``wait``) or beside them
    round       the longest of: steps and exchange, one after the other or beside each other; groups dealt

Every site has the same line. What the codecs make of a change depends on the run: a middle with its bounds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from learner.merging.merge_settings import MergeSettings, Method
from learner.sizing.devices import APPLY_S, LINE_SHARE, Interval
from learner.sizing.model_shape import ModelShape
from learner.sizing.rank_costs import delta_bytes, lag

FOUR_BIT_BYTES: Final = Interval(0.38, 0.44, 0.5 + 4 / 256)
"""For an entry: at most 4 bits and a float32 for each 256, which take 3.5 bits in bench.changes."""

FULL_BYTES: Final = Interval(1.7, 2.1, 4.5)
"""For an entry (bench.changes: 1.8 after one step at a rate of 1e-6, 2.1 after 16); more at higher rates."""

WORDS_OVER_DELTA: Final = Interval(1.0, 1.7, 2.0)
"""Bytes of ``word_changes`` over a version's delta: what is fed back becomes due later (bench.changes)."""

PLACE_SHARE: Final = 1.03
"""Bytes of the places of ``largest`` over their entropy (bench.changes: 8.2 bits where the bound is 8.08)."""

TOKEN_BYTES: Final = 12
"""Bytes of a token of a group: id, logprob, version."""

ROUND_TRIPS: Final = 3
"""Contribution, publication, fetch."""

GOOD_SHARE: Final = 0.1
"""A line that takes less of the time than this is not worth another method."""

PREFERRED: Final[Sequence[Method]] = ("in_step", "diloco", "eager", "word_changes", "dilocox")
"""Nearest to one learner first. The others are for sites that differ, and for models that barely fit."""


@dataclass(frozen=True, slots=True)
class Sites:
    """Contributors of a run, all alike, and their line."""

    contributors: int
    line_mbit_s: float
    """In each direction, of every contributor, the learner and the hub."""
    round_trip_s: float
    batch_groups: int
    tokens: int
    """Tokens of a step."""
    step_s: float
    """Seconds of a contributor's step."""


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """A round by one method."""

    method: Method
    local_steps: int
    payload_bytes: Interval
    """Handed in by each contributor."""
    version_bytes: Interval
    """Fetched by each contributor: the merged version's delta."""
    dealt_bytes: float
    """Groups for each contributor."""
    exchange_s: float
    round_s: float
    line_share: float
    """Share of the round in which a contributor takes no step, for the line's sake."""
    speedup: float
    """Pace in groups over that of one such contributor as an ordinary learner."""
    buffer_groups: int
    """Least learner.buffer_groups with which nobody waits for groups that cannot be delivered."""
    sampler_lag_versions: float
    """Versions by which a sampler on the same line lags."""
    merge_lag_versions: int
    """Versions that come between a step and the one that it is part of, at most."""


def round_costs(shape: ModelShape, settings: MergeSettings, sites: Sites) -> RoundCosts:
    """Return what a round costs by these settings."""
    steps, line_bytes_s = settings.local_steps, sites.line_mbit_s * 1e6 / 8 * LINE_SHARE
    payload, version = payload_bytes(shape, settings), version_bytes(shape, settings)
    dealt = float(TOKEN_BYTES * sites.tokens * steps)
    sent = sites.contributors * payload.middle + 2 * version.middle
    exchange_s = sent / line_bytes_s + ROUND_TRIPS * sites.round_trip_s + APPLY_S
    compute_s, waits = steps * sites.step_s, settings.overlap == "wait"
    busy_s = compute_s + exchange_s if waits else max(compute_s, exchange_s)
    round_s = max(busy_s, sites.contributors * dealt / line_bytes_s)
    ahead = 0 if waits else min(steps, math.ceil(exchange_s / sites.step_s))
    behind = lag(shape, link_mbit_s=sites.line_mbit_s, step_s=round_s, delta=version)
    return RoundCosts(
        method=settings.method,
        local_steps=steps,
        payload_bytes=payload,
        version_bytes=version,
        dealt_bytes=dealt,
        exchange_s=exchange_s,
        round_s=round_s,
        line_share=1 - compute_s / round_s,
        speedup=sites.contributors * compute_s / round_s,
        buffer_groups=sites.contributors * sites.batch_groups * (steps + ahead),
        sampler_lag_versions=behind.versions.middle,
        merge_lag_versions=settings.late_rounds + (not waits),
    )


def costs_of_methods(shape: ModelShape, sites: Sites, *, local_steps: int | None) -> list[RoundCosts]:
    """Return a round's costs by each method, in the order of ``Method``.

    Args:
        local_steps: instead of the methods' own, but for ``in_step``.
    """
    methods: Sequence[Method] = get_args(Method)
    costs = []
    for name in methods:
        own = MergeSettings(method=name)
        steps = own.local_steps if name == "in_step" else local_steps or own.local_steps
        costs.append(round_costs(shape, own.model_copy(update={"local_steps": steps}), sites))
    return costs


def recommended(rounds: Sequence[RoundCosts]) -> RoundCosts:
    """Return the method to take: the first of PREFERRED whose line costs little, else the fastest of them."""
    by_name = {one.method: one for one in rounds}
    preferred = [by_name[name] for name in PREFERRED]
    light = (one for one in preferred if one.line_share <= GOOD_SHARE)
    return next(light, max(preferred, key=lambda one: one.speedup))


def payload_bytes(shape: ModelShape, settings: MergeSettings) -> Interval:
    """Return the bytes of a change, as it is coded; see ``merging.changes``."""
    entries = shape.parameters / settings.fragments
    match settings.compression:
        case "full":
            return _times(FULL_BYTES, entries)
        case "four_bit":
            return _times(FOUR_BIT_BYTES, entries)
        case "largest":
            share = settings.share
            places = -share * math.log2(share) - (1 - share) * math.log2(1 - share) if share < 1 else 0.0
            return Interval(
                *(entries * (extra * places + 2 * share) / 8 for extra in (0.97, 1.0, PLACE_SHARE))
            )
        case "low_rank":
            ranks = (1, settings.rank, settings.rank)
            coded = (_low_rank_entries(shape, settings.rank, kept=rank) for rank in ranks)
            sizes = zip(FOUR_BIT_BYTES, coded, strict=True)
            return Interval(*(entry * count / settings.fragments for entry, count in sizes))
        case "word_changes":
            delta = version_bytes(shape, settings)
            return Interval(*(size * over for size, over in zip(delta, WORDS_OVER_DELTA, strict=True)))


def version_bytes(shape: ModelShape, settings: MergeSettings) -> Interval:
    """Return the bytes of a merged version's delta: of one fragment, which has waited for its turn."""
    turns = 1 if settings.trains_a_fragment else settings.fragments
    return _times(delta_bytes(shape, steps=settings.local_steps * turns), 1 / settings.fragments)


def learner_memory(shape: ModelShape, settings: MergeSettings, *, contributors: int) -> dict[str, float]:
    """Return the bytes in the memory of a learner that merges, by what they are of; it needs no GPU."""
    masters = 4.0 * shape.parameters
    memory = {
        "masters": masters,
        "mean change": 2 * masters / settings.fragments,  # float64
        "words": masters,  # of two versions: published, and being made
        "checkpoint": masters,  # copied, then written beside training
        "payloads": contributors * payload_bytes(shape, settings).high,
    }
    if settings.outer_momentum:
        memory |= {"momentum": masters, "checkpoint": 2 * masters}
    return memory


def kept_bytes(settings: MergeSettings) -> tuple[float, float]:
    """Return what a contributor has for each parameter beside AdamW's: on its device, and in its host."""
    left_over = 0.0 if settings.compression == "full" else 4.0
    return 4.0 + 4.0 / settings.fragments + left_over, 4.0  # anchor, sent, left over; words of two versions


def _low_rank_entries(shape: ModelShape, rank: int, *, kept: int) -> float:
    """Return the entries of all factors of ``kept`` directions, and of what is not factored."""
    return sum(
        number
        * (kept * (rows + columns) if 2 * rank * (rows + columns) <= rows * columns else rows * columns)
        for number, rows, columns in _tensors(shape)
    )


def _tensors(shape: ModelShape) -> Iterator[tuple[float, float, float]]:
    """Yield how many tensors there are of each shape, rows and columns; experts of a token count as one."""
    width, keys = shape.width, shape.keys
    yield 2 * shape.layers, width, shape.attention - keys
    yield 2 * shape.layers, width, keys
    yield (
        shape.layers * (shape.layer_matrices / width - 2 * shape.attention) / shape.inner,
        width,
        shape.inner,
    )
    yield shape.layers, 1, shape.layer_vectors
    yield 1 if shape.is_tied else 2, shape.vocabulary, width
    yield 1, 1, width


def _times(one: Interval, factor: float) -> Interval:
    return Interval(*(bound * factor for bound in one))
