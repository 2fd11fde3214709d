"""Floating point operations that a step asks of a model: what its speed is a share of."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a causal transformer multiplies."""

    body_parameters: int
    """All but embeddings and head."""
    head_parameters: int
    """Of the product that gives logits."""
    layers: int
    attention_width: int
    """Heads times the width of one."""

    def training_flops(self, lengths: Sequence[int], *, targets: int) -> float:
        """Give the operations of one forward and backward pass: 6 N a token, and attention's own.

        Counted is what the mathematics needs: no padding, no logits of prompt tokens, nothing twice
        (activation checkpointing, chunks of logits), causal attention half of the full square.

        Args:
            lengths: positions of each row.
            targets: positions whose logits are asked for, of all rows.

        Source: PaLM, arXiv:2204.02311, appendix B.
        """
        positions, squares = sum(lengths), sum(length**2 for length in lengths)
        attention = 6 * self.layers * self.attention_width * squares
        return float(6 * (self.body_parameters * positions + self.head_parameters * targets) + attention)
