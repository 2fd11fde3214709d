"""The effective size that an objective's weights leave of a sample, by how far policies are apart; no torch.

    KL(behaviour || learner), nats a token --the objective's own weights of normal log ratios--> share left

Each objective's entry in the menu says it of itself. Derivation: README.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from learner.objective.options import ClipOptions, DecoupledOptions, TruncatedOptions

_LARGEST_NATS: Final = 10.0
"""Nothing is left beyond, and e^nats is still a number."""

_GRID: Final = np.linspace(-12.0, 12.0, 4801)
"""Standard deviations at which the normal distribution is summed."""

_MASS: Final = np.exp(-(_GRID**2) / 2) / np.exp(-(_GRID**2) / 2).sum()

Ratios = NDArray[np.float64]
Weights = Callable[[Ratios], Ratios]
"""From p/q of tokens to their weights."""


@dataclass(frozen=True, slots=True)
class WeighedSample:
    """The sample whose effective size matters to an objective."""

    name: str
    """For people."""
    share: Callable[[float, float], float] | None
    """From KL(behaviour || learner), nats a token, >= 0, and the tokens of a typical completion to the
    expected effective sample size over the sample's size, in [0, 1]. None: not known of this objective."""


def of_tokens(good: Weights, bad: Weights | None = None) -> WeighedSample:
    """Return the sample of an objective by what it makes of p/q of good and of bad tokens, on the first step
    of a batch."""
    return WeighedSample("token weights", lambda nats, _: token_share(nats, good, bad))


def of_clipped(options: "ClipOptions") -> WeighedSample:
    """Return the sample of token ratios that a clip leaves out."""
    least, most, dual = 1 - options.clip_low, 1 + options.clip_high, options.dual_clip
    return of_tokens(
        lambda ratio: np.where(ratio <= most, ratio, 0.0),
        lambda ratio: np.where((ratio >= least) & (ratio <= dual), ratio, 0.0),
    )


def of_bounded(options: "ClipOptions") -> WeighedSample:
    """Return the sample of token ratios that are weights within a clip's bounds."""
    low, high = 1 - options.clip_low, 1 + options.clip_high
    return of_tokens(lambda ratio: ratio.clip(low, high))


def of_truncated(options: "TruncatedOptions") -> WeighedSample:
    """Return the sample of token ratios that are weights up to a ceiling."""
    return of_tokens(truncated(options.ceiling))


def of_decoupled(options: "DecoupledOptions") -> WeighedSample | None:
    """Return the sample of token ratios capped or masked beyond a cap; None: of another proximal policy."""
    if options.proximal != "recomputed":
        return None
    cap, beyond = options.behaviour_cap, 0.0 if options.beyond_cap == "mask" else options.behaviour_cap
    return of_tokens(lambda ratio: np.where(ratio > cap, beyond, ratio))


def truncated(ceiling: float) -> Weights:
    """Return the weights min(p/q, ceiling)."""
    return lambda ratio: ratio.clip(max=ceiling)


def token_share(nats: float, good: Weights, bad: Weights | None = None) -> float:
    """Return (E w)^2 / E w^2 under q, half of the tokens good, log p/q normal with mean -d and variance 2d.

    d is ``nats``, KL(q || p) a token; ``bad`` None: weights see no advantage. 0 where every weight is.
    """
    nats = min(max(nats, 0.0), _LARGEST_NATS)
    ratio = np.exp(math.sqrt(2 * nats) * _GRID - nats)
    weights = np.stack([good(ratio), (bad or good)(ratio)])
    square = float((weights**2 @ _MASS).mean())
    return float((weights @ _MASS).mean()) ** 2 / square if square else 0.0


def within_reach(nats: float, most_nats: float) -> float:
    """Return the share of completions that the default's trust region does not leave alone.

    1 - (P(m > h) + P(m < -h)) / 2 with m normal, mean -d and variance 2d: the mean log ratio of a completion
    whose tokens move together, which is the most that it can spread, and advantages of either sign. h is
    taken to be what tokens of the age spread, sqrt(2d), up to its end.
    """
    nats = min(max(nats, 0.0), _LARGEST_NATS)
    if not nats:
        return 1.0
    spread = math.sqrt(2 * nats)
    limit = min(spread, most_nats)
    return 1 - (_normal((-limit - nats) / spread) + _normal((nats - limit) / spread)) / 2


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
