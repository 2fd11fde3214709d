"""How steps of several contributors become versions: [learner.merge], a method's values unless set otherwise.

method        local steps  outer rate, momentum  overlap  compression   fragments  quorum  weighting
in_step       1            1, 0                  wait     full          1          all     groups
diloco        4            .7, .5                wait     full          1          all     groups
streaming     4            1, 0                  eager    four_bit      4          all     groups
eager         4            1, 0                  eager    four_bit      1          all     groups
decoupled     4            1, 0                  eager    four_bit      1          .5      tokens
dilocox       4            1, 0                  eager    low_rank      1          all     groups
parablock     4            1, 0                  eager    four_bit      3          all     groups
word_changes  4            1, 0                  eager    word_changes  1          all     groups
"""

from math import floor
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from learner.merging.formulas.stability import Overlap, largest_stable_contraction, largest_stable_rate

Method = Literal[
    "in_step", "diloco", "streaming", "eager", "decoupled", "dilocox", "parablock", "word_changes"
]
Combine = Literal["mean", "median", "trimmed_mean"]
Compression = Literal["full", "four_bit", "low_rank", "largest", "word_changes"]

_AVERAGED: Final = {"outer_rate": 1.0, "outer_momentum": 0.0}
_METHODS: Final[dict[str, dict[str, Any]]] = {
    "in_step": {"local_steps": 1, **_AVERAGED},
    "diloco": {},
    "streaming": {"overlap": "eager", "compression": "four_bit", "fragments": 4, **_AVERAGED},
    "eager": {"overlap": "eager", "compression": "four_bit", **_AVERAGED},
    "decoupled": {
        "overlap": "eager",
        "compression": "four_bit",
        "quorum": 0.5,
        "weighting": "tokens",
        "late_rounds": 2,
        **_AVERAGED,
    },
    "dilocox": {"overlap": "eager", "compression": "low_rank", **_AVERAGED},
    "parablock": {
        "overlap": "eager",
        "compression": "four_bit",
        "fragments": 3,
        "trains_a_fragment": True,
        **_AVERAGED,
    },
    "word_changes": {"overlap": "eager", "compression": "word_changes", **_AVERAGED},
}

_LEAST_CONTRACTION: Final = 0.5
"""Part of the way to an optimum that a round's local steps may go without divergence."""


class MergeSettings(BaseModel):
    """Everything that a merge depends on besides masters, momentum and contributions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    method: Method = "diloco"
    """A published way to merge, whose values the other keys have unless they are set."""

    local_steps: int = Field(default=4, ge=1, le=1000)
    """Steps that a contributor takes from a version before it hands them in (H). More travel less often, and
    what the others learn comes later."""

    outer_rate: float = Field(default=0.7, gt=0, le=2)
    """Share of the mean change that a version takes over at once (gamma); in the end it takes over
    gamma / (1 - beta) of it."""

    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Memory of earlier changes, Nesterov's (beta). The published .9 lost 5 to 12 points of score in our
    trials with reinforcement learning, and is refused where changes are merged a round late."""

    overlap: Overlap = "wait"
    """The work of a contributor while its change travels: none; train on from its own state and take in the
    others' parts a round late (eager); train on from the version before (delayed)."""

    compression: Compression = "full"
    """How a change is coded: exactly; 4 bits an entry; of low rank and 4 bits; the largest entries alone, 2
    bits each; or what it changes in the bfloat16 words, by the weight codec. What is left out is kept for the
    next."""

    rank: int = Field(default=8, ge=1, le=1024)
    """Rank of ``low_rank``."""

    share: float = Field(default=0.01, gt=0, le=1)
    """Share of the entries that ``largest`` hands in."""

    fragments: int = Field(default=1, ge=1, le=256)
    """Parts of the model that are merged in turn, one a round."""

    trains_a_fragment: bool = False
    """Whether the fragment whose turn it is is trained alone (block coordinate descent)."""

    quorum: float = Field(default=1.0, gt=0, le=1)
    """Share of the contributors present that a merge waits for."""

    grace_s: float = Field(default=5.0, ge=0, le=3600)
    """Seconds that a merge waits for the others once the quorum is there."""

    late_rounds: int = Field(default=0, ge=0, le=16)
    """Rounds by which a contribution may be late and is merged; an older one is refused, and its groups are
    dealt again."""

    weighting: Literal["groups", "tokens"] = "groups"
    """Measure of a contribution's weight: its groups, or tokens squared over steps."""

    combine: Combine = "mean"
    """How the changes of a round are made one, entry by entry: the mean by weight, the median, or the mean
    without the least and the largest quarter. The last two take every contribution alike, so that one which
    lies moves a version no further than the others differ; with fewer than three they are the mean."""

    largest_norm_ratio: float = Field(default=10.0, gt=1)
    """A change whose norm is so many times the median of the others' is refused, where there are three."""

    @model_validator(mode="before")
    @classmethod
    def _unset_are_the_methods(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        method = _METHODS.get(str(values.get("method", "diloco")), {})
        is_overlapped = values.get("overlap", "wait") != "wait"
        return {**(_AVERAGED if is_overlapped else {}), **method, **values}  # a round late, momentum costs

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.trains_a_fragment and self.fragments == 1:
            raise ValueError("trains_a_fragment with fragments = 1 trains everything; set fragments above 1")
        if self.late_rounds and self.compression == "word_changes":
            raise ValueError(
                f"late_rounds is {self.late_rounds}, and word_changes are coded against the words of one "
                "version; set late_rounds = 0 or another compression"
            )
        if self.combine != "mean" and self.compression in ("largest", "word_changes"):
            raise ValueError(
                f"combine is {self.combine}, and {self.compression} leaves most entries of a change 0, which "
                "would be all that is merged; set combine to mean or another compression"
            )
        rate, beta, overlap = self.outer_rate, self.outer_momentum, self.overlap
        contraction = largest_stable_contraction(rate, beta, overlap=overlap)
        if contraction < _LEAST_CONTRACTION:
            stable = largest_stable_rate(beta, overlap=overlap, contraction=_LEAST_CONTRACTION)
            raise ValueError(
                f"outer_rate {rate:g} with outer_momentum {beta:g} and overlap {overlap} diverges once the "
                f"local steps of a round go more than {contraction:.0%} of the way to an optimum; "
                f"set outer_rate to {floor(100 * stable) / 100:.2f} or less, or outer_momentum lower"
            )
        return self
