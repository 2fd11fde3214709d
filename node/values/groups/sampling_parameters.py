"""How completions are sampled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How completions are sampled. A behaviour logprob is of what each token was drawn from.

    The vocabulary is cut after temperature, by min-p, then top-k, then top-p.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest token are cut off; 0: none."""
    stop: tuple[str, ...] = ()
    """A completion ends once its text contains one of these."""

    @property
    def is_truncated(self) -> bool:
        """Whether min-p, top-k or top-p cuts off some of the vocabulary."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0

    @property
    def truncation(self) -> str:
        """The settings that cut off the vocabulary, for messages."""
        return f"min_p={self.min_p} top_k={self.top_k} top_p={self.top_p}"
